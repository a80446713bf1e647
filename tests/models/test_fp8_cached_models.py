# SPDX-License-Identifier: Apache-2.0
"""Engines whose keys and values are e4m3: transformers' tokens over a cache that the test rounds, twice the blocks from
the same memory, scales as checkpoints name them, and what is refused."""

from __future__ import annotations

import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseeks  # noqa: F401  its checkpoints are among tiny_models'
import tiny_dense  # noqa: F401
import tiny_experts  # noqa: F401
import tiny_fp8_caches as rounded
import tiny_models as tiny
import torch

from vllm import LLM
from vllm.config import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import main
from vllm.model_executor.layers.quantization import kv_cache
from vllm.model_executor.layers.quantization.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.model_loader.weight_utils import StoredTensor
from vllm.v1.kv_cache_interface import MambaSpec

NUM_TOKENS = 24
PROMPTS = [tiny.prompt(length, seed=1) for length in (1, 5, 33, 64, 17, 90, 40, 8)]
ROOT = Path(__file__).parents[2]


def make_llm(name: str, scaled: bool = True, **kwargs: Any) -> LLM:
    folder = rounded.checkpoint(name) if scaled else rounded._models(name).checkpoint(name)
    settings: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "num_gpu_blocks_override": 200, "enable_prefix_caching": False,
    }  # fmt: skip
    return LLM(folder, kv_cache_dtype="fp8", **{**settings, **kwargs})


def run(llm: LLM, prompts: list[tuple[int, ...]] = PROMPTS) -> list[tuple[int, ...]]:
    try:
        return tiny.tokens(tiny.generate(llm, prompts, NUM_TOKENS))
    finally:
        llm.llm_engine.scheduler.check_integrity()
        llm.shutdown()


def expected(name: str, prompts: list[tuple[int, ...]] = PROMPTS, scaled: bool = True) -> list[tuple[int, ...]]:
    return [rounded.greedy(name, prompt, NUM_TOKENS, scaled) for prompt in prompts]


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "v2-lite", "v3", "qwen3.5-moe"])
def test_tokens_are_those_of_a_rounded_cache(name: str, scaled: bool, nan_poison: None) -> None:
    """Grouped heads; windows and soft caps; sinks; latents, absorbed and expanded; beside recurrent states."""
    assert run(make_llm(name, scaled)) == expected(name, scaled=scaled)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "v3"])
def test_the_rounded_cache_says_other_things(name: str) -> None:
    assert expected(name) != [tiny.greedy(name, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert expected(name) != expected(name, scaled=False)


@pytest.mark.parametrize("name", ["llama", "gemma2", "v3"])
def test_chunks_preemption_and_padded_rows(name: str, nan_poison: None) -> None:
    """However a prompt comes to the cache it is read back rounded, so chunks of 7 are one prompt of 90."""
    sizes = {"cudagraph_capture_sizes": [4, 8]}
    assert run(make_llm(name, max_num_batched_tokens=7, max_num_seqs=4, compilation_config=sizes)) == expected(name)
    llm = make_llm(name, block_size=8, num_gpu_blocks_override=27, max_model_len=200, max_num_batched_tokens=64)
    preempted, original = [], llm.llm_engine.scheduler._preempt
    llm.llm_engine.scheduler._preempt = lambda request: (preempted.append(request), original(request))
    assert run(llm) == expected(name)
    assert preempted, "the cache was large enough"


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_prefix_hits_and_sleep(name: str, nan_poison: None) -> None:
    base = tiny.prompt(70, seed=2)
    prompts = [base[:60] + tiny.prompt(tail, seed=3) for tail in (9, 45)]
    llm = make_llm(name, block_size=8, enable_prefix_caching=True)
    tiny.generate(llm, [base], 1)
    outputs = tiny.generate(llm, prompts, NUM_TOKENS)
    assert tiny.tokens(outputs) == expected(name, prompts)
    assert all(output.num_cached_tokens >= 56 for output in outputs)
    llm.sleep()
    llm.wake_up()
    layer = next(kv_cache.cached_in_fp8(llm.llm_engine.worker.runner.model))
    assert layer.kv_cache[0].dtype is rounded.FP8
    assert not layer.kv_cache[0].view(torch.uint8).any()
    assert run(llm, prompts) == expected(name, prompts)


def test_tokens_of_triton(monkeypatch: pytest.MonkeyPatch, nan_poison: None) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    prompt = tiny.prompt(35, seed=3)  # expanded, then absorbed
    llm = make_llm("latent", max_num_batched_tokens=40, compilation_config={"cudagraph_capture_sizes": [4, 40]})
    outputs = tiny.generate(llm, [prompt], 2)
    llm.shutdown()
    assert tiny.tokens(outputs) == [rounded.greedy("latent", prompt, 2)]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("v3", 3), ("qwen3.5-moe", 1)])
def test_twice_the_blocks_from_the_same_memory(name: str, layers: int) -> None:
    """In 16 bits; recurrent states stay as they are."""
    blocks, states = {}, {}
    for dtype in ("auto", "fp8"):
        llm = LLM(
            rounded._models(name).checkpoint(name), dtype="bfloat16", kv_cache_dtype=dtype, skip_tokenizer_init=True,
            max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=1 << 19,
            enable_prefix_caching=name != "qwen3.5-moe",
        )  # fmt: skip
        runner = llm.llm_engine.worker.runner
        specs = runner.get_kv_cache_specs().values()
        states[dtype] = [spec for spec in specs if isinstance(spec, MambaSpec)]
        config = runner.kv_cache_config
        blocks[dtype] = (1 << 19) - config.num_state_slots * config.bytes_per_state_slot, config
        assert len(list(kv_cache.cached_in_fp8(runner.model))) == layers
        llm.shutdown()
    (left, plain), (left_fp8, halved) = blocks["auto"], blocks["fp8"]
    assert states["auto"] == states["fp8"]
    assert left == left_fp8
    assert halved.bytes_per_block * 2 == plain.bytes_per_block
    most = 4 * 16 + 1  # all that four requests can fill
    assert plain.num_blocks == left // plain.bytes_per_block or plain.num_blocks >= most
    if name != "qwen3.5-moe":
        assert halved.num_blocks == left // halved.bytes_per_block >= 2 * plain.num_blocks


def test_fit_counts_half_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fit(*options: str) -> str:
        command = ["doctor", "--fit", tiny.checkpoint("llama"), "--dtype", "bfloat16", "--max-num-batched-tokens", "8"]
        assert main([*command, "--max-num-seqs", "4", "--device-memory", "0.001", *options]) in (0, 1)
        return capsys.readouterr().out

    plain, halved = fit(), fit("--kv-cache-dtype", "fp8")
    width = 2 * 2 * 2 * 16  # layers, keys and values, heads, head size
    assert f" {2 * width} " in plain
    assert f" {width} " in halved
    assert "--kv-cache-dtype fp8" not in halved
    assert main(["doctor", "--fit", tiny.checkpoint("llama"), "--device-memory", "1", "--kv-cache-dtype", "int4"]) == 2
    assert "kv_cache_dtype='int4' is not supported" in capsys.readouterr().err


# --- scales -----------------------------------------------------------------------------------------------------------


def scale(name: str, value: Any, **fields: Any) -> StoredTensor:
    value = torch.as_tensor(value, dtype=torch.float32)
    return StoredTensor(name, tuple(value.shape), value.to, **fields)


def fp8_model(name: str = "llama") -> Any:
    from vllm.model_executor.models.registry import ModelRegistry

    config = EngineArgs(rounded._models(name).checkpoint(name), kv_cache_dtype="fp8_e4m3").create_engine_config()
    model_cls, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture)
    return model_cls(vllm_config=config)


@pytest.fixture
def of_ranks() -> Any:
    from vllm.distributed.parallel_state import as_rank

    with as_rank(0, 1, 1, False, torch.device("cpu")):
        yield


AT = "model.layers.{}.self_attn."


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_cache_scale", "v_cache_scale"),
        ("kv_scale", None),
        ("attn.kv_scale", None),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_names_of_scales(k: str, v: str | None, shape: tuple, of_ranks, caplog) -> None:
    model, rest = fp8_model(), [scale(AT.format(1) + "q_scale", -1.0), scale(AT.format(9) + "k_scale", 0.0)]
    names = [name for name in (k, v) if name]
    stored = [
        scale(AT.format(i) + name, torch.full(shape, 0.5 + i + 2 * j)) for i in range(2) for j, name in enumerate(names)
    ]
    with caplog.at_level(logging.INFO):
        kv_cache.load_cache_scales(model, stored + rest, None)
    layers = list(kv_cache.cached_in_fp8(model))
    assert [(layer.k_scale, layer.v_scale) for layer in layers] == [(0.5 + i, 0.5 + i + 2 * bool(v)) for i in range(2)]
    largest = "3.5" if v else "1.5"
    assert f"KV cache in FP8 (e4m3): scales of the checkpoint for 2 layers, 0.5 to {largest}" in caplog.text
    assert any(re.search(pattern, tensor.name) for tensor in stored for pattern in model.ignored_weights)


def test_one_line_says_which_scales(of_ranks, caplog) -> None:
    with caplog.at_level(logging.INFO):
        kv_cache.load_cache_scales(fp8_model(), [], None)
    assert "KV cache in FP8 (e4m3): no scales in the checkpoint, 1.0 for all layers" in caplog.text
    model = fp8_model()
    with caplog.at_level(logging.WARNING):
        kv_cache.load_cache_scales(model, [scale(AT.format(1) + "kv_scale", 0.25)], None)
    assert "for 1 layers, 0.25 to 0.25; 1.0 for the other 1" in caplog.text
    assert [layer.k_scale for layer in kv_cache.cached_in_fp8(model)] == [1.0, 0.25]
    latent = fp8_model("v3")  # one vector, one scale: that of keys
    kv_cache.load_cache_scales(
        latent, [scale(AT.format(2) + w, s) for w, s in (("k_scale", 0.5), ("v_scale", 2))], None
    )
    assert [(layer.k_scale, layer.v_scale) for layer in kv_cache.cached_in_fp8(latent)] == [(1.0, None)] * 2 + [
        (0.5, None)
    ]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([scale(AT.format(0) + "k_scale", 0.0)], r"layers\.0\.self_attn\.k_scale is 0\.0.*positive.*='auto'"),
        ([scale(AT.format(1) + "v_scale", -0.5)], r"layers\.1\.self_attn\.v_scale is -0\.5"),
        ([scale(AT.format(0) + "kv_scale", math.nan)], r"kv_scale is nan"),
        ([scale(AT.format(0) + "k_scale", math.inf)], r"k_scale is inf"),
        ([scale(AT.format(0) + "k_scale", [1.0, 2.0])], r"k_scale \[2\] is not one number.*per tensor.*='auto'"),
        ([scale(AT.format(0) + "k_scale", 1.0, unreadable="stored as I8")], r"k_scale \[\] is stored as I8"),
        ([scale(AT.format(0) + "k_scale", 1.0)], r"self_attn\.v_scale is missing beside k_scale.*='auto'"),
        ([scale(AT.format(0) + "v_scale", 1.0)], r"self_attn\.k_scale is missing beside v_scale"),
    ],
)
def test_bad_scales_are_named(stored: list[StoredTensor], message: str, of_ranks) -> None:
    with pytest.raises(ValueError, match=message):
        kv_cache.load_cache_scales(fp8_model(), stored, None)


def test_caches_of_other_formats_are_refused(of_ranks) -> None:
    for key, other in (("num_bits", 4), ("type", "int"), ("strategy", "attn_head"), ("symmetric", False)):
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        kv_cache.load_cache_scales(fp8_model(), [], CompressedTensorsConfig({"kv_cache_scheme": scheme}))
        quantization = CompressedTensorsConfig({"kv_cache_scheme": {**scheme, key: other}})
        with pytest.raises(ValueError, match=rf"kv_cache_scheme has .'{key}': .*='auto'"):
            kv_cache.load_cache_scales(fp8_model(), [], quantization)


def test_a_bad_scale_stops_the_engine_and_auto_does_not_read_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = Path(tiny.checkpoint("llama"))
    tensors = {**load_file(source / "model.safetensors"), AT.format(1) + "v_scale": torch.tensor(math.nan)}
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "num_gpu_blocks_override": 40}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.v_scale is nan"):
        LLM(str(tmp_path), kv_cache_dtype="fp8", **options)
    llm = LLM(str(tmp_path), **options)
    assert run(llm, PROMPTS[:2]) == [tiny.greedy("llama", prompt, NUM_TOKENS) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_inc", "int8", "bfloat16"])
def test_other_types_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"kv_cache_dtype='{dtype}'.*'auto' .* or 'fp8'"):
        CacheConfig(cache_dtype=dtype)
    with pytest.raises(NotImplementedError, match=r"calculate_kv_scales=True"):
        EngineArgs("model", calculate_kv_scales=True)
    EngineArgs("model", calculate_kv_scales=False)


# --- NaN --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_the_trace_finds_nan_in_the_cache(name: str, monkeypatch, capfd) -> None:
    monkeypatch.setenv("VLLM_DEBUG_NAN", "1")
    llm = make_llm(name, scaled=False, max_num_seqs=2)
    runner = llm.llm_engine.worker.runner
    original = runner.execute_model

    def spoilt(*args: Any) -> Any:
        if runner.step == 2:
            layer = list(kv_cache.cached_in_fp8(runner.model))[1]
            row = runner.input_batch.row_of["1"]
            block = int(runner.input_batch.block_table.table[row, 0])
            layer.kv_cache[0].view(torch.uint8)[block, 0, 3, 0] = 0x7F
        return original(*args)

    monkeypatch.setattr(runner, "execute_model", spoilt)
    outputs = tiny.generate(llm, [tiny.prompt(20, seed=6), tiny.prompt(21, seed=7)], 6)
    llm.shutdown()
    assert "input was clean; kv_blocks=" in (told := capfd.readouterr().out)
    assert "nan_at_positions=[3]..." in told
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]


# --- real text --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_perplexity_of_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT / "examples" / "offline_inference"))
    from smollm2 import ensure_checkpoint

    from vllm import SamplingParams
    from vllm.tokenizers import get_tokenizer

    source = ensure_checkpoint("dense")
    ids = get_tokenizer(str(source)).encode((ROOT / "tests" / "quantization" / "perplexity.txt").read_text())[:700]

    def perplexity(dtype: str) -> float:
        llm = LLM(
            str(source), dtype="bfloat16", kv_cache_dtype=dtype, max_model_len=1024, max_num_batched_tokens=128,
            max_num_seqs=4, num_gpu_blocks_override=100,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        llm.shutdown()
        given = [entry[i].logprob for i, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        return math.exp(-sum(given) / len(given))

    plain, coded = perplexity("auto"), perplexity("fp8")
    with capsys.disabled():
        print(f"\nSmolLM2 in bfloat16: perplexity {plain:.3f}, over an FP8 cache {coded:.3f}")
    assert coded <= 1.02 * plain
