# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5 in one process: equal to transformers, and one answer however requests are batched, cut,
preempted or padded, with uninitialised memory NaN."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from vllm.model_executor.layers.mamba.gdn_linear_attn import GatedDeltaNet

pytestmark = pytest.mark.usefixtures("nan_poison")
NAMES = ("qwen3-next", "qwen3.5-moe-32")
LENGTHS = (1, 3, 40, 64, 65, 7, 130)
PROMPTS = [tiny.prompt(length, seed=5) for length in LENGTHS]
NUM_TOKENS = 16


def expected(name: str, prompts: list[tuple[int, ...]] = PROMPTS) -> list[tuple[int, ...]]:
    return [hybrids.greedy(name, prompt, NUM_TOKENS) for prompt in prompts]


def run(name: str, prompts: list[tuple[int, ...]] = PROMPTS, **kwargs: Any) -> list[tuple[int, ...]]:
    llm = hybrids.make_llm(name, **kwargs)
    try:
        result = tiny.tokens(tiny.generate(llm, prompts, NUM_TOKENS))
        llm.llm_engine.scheduler.check_integrity()
        return result
    finally:
        llm.shutdown()


def delta_nets(llm: Any) -> list[GatedDeltaNet]:
    return [m for m in llm.llm_engine.worker.runner.model.modules() if isinstance(m, GatedDeltaNet)]


# --- equal to transformers -----------------------------------------------------------------------------------------


FOUR_LAYERS = [name for name in hybrids.NAMES if "8-layers" not in name]  # 1e-4 is the roundings of four layers


@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in FOUR_LAYERS), ("qwen3-next", 1)])
def test_greedy_tokens_and_logprobs(name: str, seed: int) -> None:
    prompts = [tiny.prompt(length, seed) for length in ((1, 17, 300) if seed == 0 else (2, 64))]
    llm = hybrids.make_llm(name, seed)
    outputs = tiny.generate(llm, prompts, 64, logprobs=2)
    llm.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        given = tuple(completion.token_ids)
        # One pass over prompt and answer says what transformers would have chosen at every step.
        reference = hybrids.logprobs(name, prompt + given, seed)[len(prompt) - 1 : -1]
        assert given == tuple(reference.argmax(-1).tolist()), f"{name}, prompt of {len(prompt)}"
        for step, chosen in enumerate(completion.logprobs):
            for token_id, logprob in chosen.items():
                assert logprob.logprob == pytest.approx(float(reference[step, token_id]), abs=1e-4)


def test_decode_is_transformers_own_decode() -> None:
    """As above by transformers' step-by-step path, whose state handling is its own."""
    assert run("qwen3-next") == expected("qwen3-next")


@pytest.mark.parametrize(("name", "seed"), [("qwen3-next-128", 0), ("qwen3.5-moe", 1), ("qwen3.5", 0)])
def test_bfloat16_is_no_worse_than_transformers(name: str, seed: int) -> None:
    """The kind of fault: state or gates rounded to 16 bits. Both are compared with fp32 on the same bf16 weights, whose
    own error is smaller by four orders of magnitude."""
    prompts = [tiny.prompt(200, i) for i in range(4)]
    theirs = [hybrids.logprobs(name, prompt, seed, torch.bfloat16) for prompt in prompts]
    model = hybrids.AutoModelForCausalLM.from_pretrained(hybrids.checkpoint(name, seed), dtype=torch.bfloat16).float()
    llm = hybrids.make_llm(name, seed, dtype="bfloat16")
    outputs = tiny.generate(llm, prompts, 1, prompt_logprobs=0)
    llm.shutdown()
    our_errors, their_errors = [], []
    for prompt, output, their in zip(prompts, outputs, theirs, strict=True):
        target = torch.tensor(prompt[1:])[:, None]
        with torch.inference_mode():
            exact = model(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1].gather(1, target)[:, 0]
        ours = torch.tensor([given[prompt[i]].logprob for i, given in enumerate(output.prompt_logprobs) if given])
        our_errors.append((ours - exact).abs())
        their_errors.append((their[:-1].gather(1, target)[:, 0] - exact).abs())
    ours, theirs = torch.cat(our_errors).mean().item(), torch.cat(their_errors).mean().item()
    assert ours <= theirs, f"mean error a token {ours:.3e}, transformers' {theirs:.3e}"


# --- one answer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 64, 65])
def test_chunked_prefill(name: str, chunk: int) -> None:
    prompts = PROMPTS[:5] if chunk < 64 else PROMPTS
    assert run(name, prompts, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4)) == expected(name, prompts)


@pytest.mark.parametrize("name", NAMES)
def test_alone_or_mixed(name: str) -> None:
    order = [3, 6, 0, 5, 2, 4, 1]
    assert run(name, max_num_seqs=1) == expected(name)
    got = run(name, [PROMPTS[i] for i in order], max_num_batched_tokens=48, max_num_seqs=3)
    assert got == [expected(name)[i] for i in order]


@pytest.mark.parametrize("name", NAMES)
def test_preemption_recomputes_the_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = hybrids.make_llm(name, block_size=8, num_gpu_blocks_override=28, max_model_len=200, max_num_batched_tokens=64)
    scheduler, preempted = llm.llm_engine.scheduler, []
    original = scheduler._preempt
    monkeypatch.setattr(scheduler, "_preempt", lambda request: (preempted.append(request), original(request)))
    got = tiny.tokens(tiny.generate(llm, PROMPTS, NUM_TOKENS))
    scheduler.check_integrity()
    llm.shutdown()
    assert preempted, "the cache was large enough: nothing was preempted"
    assert got == expected(name)


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows(name: str) -> None:
    got = run(name, max_num_batched_tokens=96, compilation_config={"cudagraph_capture_sizes": [8, 16, 96]})
    assert got == expected(name)


def test_plain_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk-wise form that runs where no kernel can be built."""
    monkeypatch.setenv("VLLM_KERNELS", "gated_delta_net=reference")
    assert run("qwen3-next") == expected("qwen3-next")


# --- state slots ---------------------------------------------------------------------------------------------------


def state_of(llm: Any, slots: list[int] | slice) -> list[torch.Tensor]:
    return [pool[slots].clone() for net in delta_nets(llm) for pool in (net.conv_state, net.recurrent_state)]


def test_reused_slots_begin_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots handed on from finished requests; the fault put back: a slot that keeps its last owner's state."""
    name = "qwen3-next"
    assert run(name, PROMPTS * 2, max_num_seqs=2) == expected(name) * 2
    monkeypatch.setattr(GatedDeltaNet, "clear_state", lambda self, slot: None)
    assert run(name, PROMPTS * 2, max_num_seqs=2, enforce_eager=True) != expected(name) * 2


def test_a_step_writes_only_its_requests_slots() -> None:
    """The pad slot, free slots and the slots of requests that the step does not run keep every bit, NaN included."""
    llm = hybrids.make_llm("qwen3.5-moe", max_num_seqs=6)
    for net in delta_nets(llm):
        net.conv_state.fill_(float("nan"))
        net.recurrent_state.fill_(float("nan"))
    got = tiny.tokens(tiny.generate(llm, PROMPTS[:3], NUM_TOKENS))
    used, others = [1, 2, 3], [0, 4, 5, 6]
    assert all(state.isnan().all() for state in state_of(llm, others))
    assert all(state.isfinite().all() for state in state_of(llm, used))
    llm.shutdown()
    assert got == expected("qwen3.5-moe", PROMPTS[:3])


def test_rows_and_slots_after_the_first_request_ends() -> None:
    """Case 17: four requests, the first ends early, its slot and blocks go to a fifth; the others are untouched."""
    from vllm import SamplingParams

    name = "qwen3.5-moe"
    prompts = PROMPTS[:5]
    llm = hybrids.make_llm(name, max_num_seqs=4)
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in (2, NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, NUM_TOKENS)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    llm.shutdown()
    got = tiny.tokens(outputs)
    assert got == [expected(name, [prompts[0]])[0][:2], *expected(name, prompts[1:])]


def test_one_memory_budget() -> None:
    """State slots and attention blocks share what there is; too little for the states is refused with its numbers."""
    llm = hybrids.make_llm("qwen3-next", num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20, max_model_len=64)
    config = llm.llm_engine.scheduler.kv_cache_config
    layers = llm.llm_engine.worker.get_kv_cache_specs()
    assert len(layers) == 4
    assert config.num_state_slots == 9
    per_slot = 3 * (3 * (2 * 2 * 16 + 4 * 16) * 4 + 4 * 16 * 16 * 4)
    assert config.bytes_per_state_slot == per_slot
    assert config.total_bytes <= 1 << 20
    llm.shutdown()
    with pytest.raises(ValueError, match="max_num_seqs=8"):
        hybrids.make_llm("qwen3-next", num_gpu_blocks_override=None, kv_cache_memory_bytes=8 * per_slot)


# --- configuration and checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, True, False])
def test_prefix_caching_is_refused(asked: bool | None, log: pytest.LogCaptureFixture) -> None:
    name, base = "qwen3.5-moe", PROMPTS[2]
    llm = hybrids.make_llm(name, enable_prefix_caching=asked, block_size=8)
    lines = [record for record in log.records if "prefix caching" in record.getMessage()]
    assert len(lines) == (asked is not False)
    for _ in range(2):
        (output,) = tiny.generate(llm, [base], NUM_TOKENS)
        assert tiny.tokens([output]) == expected(name, [base])
        assert output.num_cached_tokens == 0
    llm.shutdown()


def multimodal_checkpoint(name: str, target: Path, stacked: bool) -> None:
    """The text checkpoint ``name`` as it sits in the published multimodal ones, with vision and multi-token weights."""
    source = Path(hybrids.checkpoint(name))
    config = json.loads((source / "config.json").read_text())
    is_moe = config["model_type"] == "qwen3_5_moe_text"
    target.mkdir()
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if is_moe else "Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if is_moe else "qwen3_5",
        "text_config": {k: v for k, v in config.items() if k != "architectures"},
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
    }
    (target / "config.json").write_text(json.dumps(outer))
    weights = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in load_file(source / "model.safetensors").items()
    }
    if stacked:
        weights = stack_experts(weights)
    weights["model.visual.blocks.0.attn.qkv.weight"] = torch.full((96, 32), float("nan"))
    weights["mtp.layers.0.input_layernorm.weight"] = torch.full((64,), float("nan"))
    save_file(weights, target / "model.safetensors")


def stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stacked = {key: value for key, value in weights.items() if ".mlp.experts." not in key}
    for prefix in {key.split(".mlp.experts.")[0] for key in weights if ".mlp.experts." in key}:
        parts = {
            kind: torch.stack([weights[f"{prefix}.mlp.experts.{e}.{kind}_proj.weight"] for e in range(8)])
            for kind in ("gate", "up", "down")
        }
        stacked[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        stacked[f"{prefix}.mlp.experts.down_proj"] = parts["down"]
    return stacked


@pytest.mark.parametrize(("name", "stacked"), [("qwen3.5", False), ("qwen3.5-moe", False), ("qwen3.5-moe", True)])
def test_text_model_of_a_multimodal_checkpoint(
    name: str, stacked: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    multimodal_checkpoint(name, tmp_path / "model", stacked)
    got = run(name, PROMPTS[:3], model=str(tmp_path / "model"))
    assert got == expected(name, PROMPTS[:3])
    assert sum("only the text model" in record.getMessage() for record in log.records) == 1


def test_missing_and_unknown_weights_are_refused(tmp_path: Path) -> None:
    multimodal_checkpoint("qwen3.5-moe", tmp_path / "model", True)
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.language_model.layers.2.mlp.experts.down_proj"]
    weights["model.language_model.layers.0.linear_attn.extra"] = torch.zeros(1)
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"(?s)linear_attn\.extra.*|layers\.2\.mlp\.experts\.7\.down_proj") as error:
        hybrids.make_llm("qwen3.5-moe", model=str(tmp_path / "model"))
    assert "linear_attn.extra" in str(error.value)
    assert "layers.2.mlp.experts.7.down_proj" in str(error.value)


def test_unknown_layer_kind_is_refused(tmp_path: Path) -> None:
    shutil.copytree(hybrids.checkpoint("qwen3-next"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["layer_types"][1] = "sliding_attention"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sliding_attention"):
        hybrids.make_llm("qwen3-next", model=str(tmp_path / "model"))
