# SPDX-License-Identifier: Apache-2.0
"""The methods of LLM beyond generate and chat, on tiny models; the right values are transformers'."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, generate, greedy, make_llm, prompt, reference_model, tokens

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams


@pytest.fixture(scope="module")
def llm():
    llm = make_llm("llama", enable_prefix_caching=True, max_logprobs=VOCAB, disable_log_stats=False)
    yield llm
    llm.shutdown()


def beams_of_transformers(
    prompt_ids: tuple[int, ...], width: int, num_tokens: int, ends: list[int] | None, **options
) -> list[tuple[tuple[int, ...], float]]:
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = reference_model("llama").generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=ends,
            early_stopping="never",
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    sequences = []
    for row, score in zip(out.sequences[:, len(prompt_ids) :].tolist(), out.sequences_scores.tolist(), strict=True):
        stop = next((i + 1 for i, token in enumerate(row) if token in (ends or ())), num_tokens)
        sequences.append((tuple(row[:stop]), score))
    return sequences


def end_tokens() -> list[int]:
    """Two tokens in the middle of what transformers' beams are without end tokens."""
    beams = [ids for length in (9, 5) for ids, _ in beams_of_transformers(prompt(length), 4, 8, None)]
    return sorted({beams[0][3], beams[4][4]})


@pytest.mark.parametrize(
    ("with_ends", "length_penalty"), [(False, 1.0), (True, 1.0), (True, 0.0), (True, 2.0), (True, -1.0)], ids=str
)
def test_beam_search_is_transformers(llm, monkeypatch, with_ends, length_penalty):
    ends = end_tokens() if with_ends else None
    monkeypatch.setattr(llm.llm_engine.input_processor, "eos_token_id", None)
    monkeypatch.setattr(llm.llm_engine.input_processor, "other_eos_token_ids", ends or [])
    prompts = [prompt(9), prompt(5), prompt(17)]
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=length_penalty)
    found = llm.beam_search([{"prompt_token_ids": list(p)} for p in prompts], params, concurrency_limit=2)
    ended: list[bool] = []
    for p, output in zip(prompts, found, strict=True):
        expected = beams_of_transformers(p, 4, 8, ends, length_penalty=length_penalty)
        assert [tuple(s.tokens[len(p) :]) for s in output.sequences] == [ids for ids, _ in expected]
        scores = [s.cum_logprob / (len(s.tokens) - len(p)) ** length_penalty for s in output.sequences]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
        for sequence in output.sequences:
            assert sequence.finish_reason == ("stop" if sequence.tokens[-1] in (ends or ()) else "length")
            own = [row[t].logprob for row, t in zip(sequence.logprobs, sequence.tokens[len(p) :], strict=True)]
            assert sum(own) == pytest.approx(sequence.cum_logprob, abs=1e-5)
        if ends and length_penalty == 1.0:
            ended += [s.finish_reason == "stop" for s in output.sequences]
    assert not ended or any(ended), "no end token was met"
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_beam_search_ignores_end_tokens_when_asked(llm, monkeypatch):
    monkeypatch.setattr(llm.llm_engine.input_processor, "other_eos_token_ids", end_tokens())
    p = prompt(9)
    [output] = llm.beam_search({"prompt_token_ids": list(p)}, BeamSearchParams(3, 5, ignore_eos=True))
    assert [tuple(s.tokens[len(p) :]) for s in output.sequences] == [
        ids for ids, _ in beams_of_transformers(p, 3, 5, None)
    ]
    with pytest.raises(ValueError, match="beam_width=0"):
        BeamSearchParams(0, 5)


def test_enqueue_runs_nothing_until_it_is_waited_for(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    prompts = [prompt(9), prompt(5), prompt(17)]
    steps = llm.llm_engine.stats.steps
    first = llm.enqueue([{"prompt_token_ids": list(p)} for p in prompts[:2]], params, use_tqdm=False)
    assert llm.llm_engine.stats.steps == steps
    # generate() steps the queued ones too; their outputs are kept.
    between = llm.generate({"prompt_token_ids": list(prompts[2])}, params, use_tqdm=False)
    first += llm.enqueue({"prompt_token_ids": list(prompts[2])}, params, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first
    assert tokens(outputs) == [greedy("llama", p, 5) for p in prompts]
    assert tokens(between) == [greedy("llama", prompts[2], 5)]
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert not llm._finished


def profiled(folder: Path) -> dict[str, set[int]]:
    """Event → the threads that it is from, of the one trace in ``folder``."""
    (path,) = folder.iterdir()
    threads: dict[str, set[int]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault(event["name"], set()).add(event["tid"])
    return threads


def test_a_profile_holds_what_the_thread_in_the_devices_place_does(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    llm = make_llm("qwen3", async_scheduling=True, enforce_eager=True)
    mlp = llm.llm_engine.worker.get_model().model.layers[1].mlp
    forward = mlp.forward

    def named(*args):
        with torch.profiler.record_function("layers.1.mlp"):
            return forward(*args)

    mlp.forward = named
    llm.start_profile()
    generate(llm, [prompt(5)], 2)
    llm.stop_profile()
    threads = profiled(tmp_path)
    assert threads["layers.1.mlp"] <= threads["aten::copy_"]
    assert not threads["layers.1.mlp"] & {threading.get_native_id()}
    llm.shutdown()


def test_rpc_model_world_and_metrics(llm, tmp_path: Path, monkeypatch):
    assert llm.collective_rpc("get_kv_cache_specs") == [llm.llm_engine.worker.get_kv_cache_specs()]
    assert llm.collective_rpc(lambda worker, a, b=0: (worker.device.type, a + b), args=(1,), kwargs={"b": 2}) == [
        ("cpu", 3)
    ]
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    assert llm.get_world_size() == llm.get_world_size(include_dp=False) == 1
    before = {m.name: m for m in llm.get_metrics()}
    generate(llm, [prompt(9)], 4)
    after = {m.name: m for m in llm.get_metrics()}
    assert after["vllm:generation_tokens"].value - before["vllm:generation_tokens"].value == 4
    assert after["vllm:num_requests_running"].value == 0
    with pytest.raises(ValueError, match="VLLM_TORCH_PROFILER_DIR"):
        llm.start_profile()
    with pytest.raises(ValueError, match="not started"):
        llm.stop_profile()
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    llm.start_profile("mine")
    generate(llm, [prompt(5)], 2)
    llm.stop_profile()
    assert [path.name.startswith("mine-rank0.") for path in tmp_path.iterdir()] == [True]
    assert "aten::" in str(profiled(tmp_path))
    for name in ("encode", "embed", "classify", "reward", "score"):
        with pytest.raises(NotImplementedError, match=f"LLM.{name}"):
            getattr(llm, name)("a")


def test_metrics_need_counting(tiny_llama, fake_worker):
    with pytest.raises(ValueError, match="disable_log_stats"):
        LLM(str(tiny_llama)).get_metrics()


def test_set_tokenizer(tiny_llama, fake_worker):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    llm = LLM(str(tiny_llama))
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "hello": 3}, "<unk>")))
    llm.set_tokenizer(other)
    assert llm.get_tokenizer() is other
    [output] = llm.generate("hello", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert output.prompt_token_ids == [3]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(level):
    llm = make_llm("qwen3-moe", enable_prefix_caching=True)
    runner, prompts = llm.llm_engine.worker.runner, [prompt(40)]
    expected = tokens(generate(llm, prompts, 6))
    caches = [layer.kv_cache[0].untyped_storage() for layer in runner.cached_layers.values()]
    assert all(storage.nbytes() for storage in caches)
    llm.sleep(level)
    assert llm.is_sleeping()
    assert all(layer.kv_cache is None for layer in runner.cached_layers.values())
    llm.sleep(level)
    with pytest.raises(ValueError, match=r"sleeps.*wake_up"):
        generate(llm, prompts, 2)
    with pytest.raises(ValueError, match=r"'cache'.*unknown; give some of"):
        llm.wake_up(["cache"])
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    with pytest.raises(ValueError, match="sleeps"):
        generate(llm, prompts, 2)
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping()
    if level == 2:
        held = [
            name
            for module in runner.model.modules()
            for name in getattr(module, "weight_attributes", ())
            if getattr(module, name) is not None
        ]
        assert not held
        with pytest.raises(ValueError, match="dropped by sleep"):
            generate(llm, prompts, 2)
        named = list(reference_model("qwen3-moe").state_dict().items())
        runner.model.load_weights(named[:5])
        with pytest.raises(ValueError, match="weights were dropped"):
            generate(llm, prompts, 2)
        runner.model.load_weights(named[5:])
    outputs = generate(llm, prompts, 6)
    assert tokens(outputs) == expected
    assert outputs[0].num_cached_tokens == 0, "the cache that held the prefix is gone"
    llm.enqueue({"prompt_token_ids": [5]}, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="1 requests are unfinished"):
        llm.sleep()
    with pytest.raises(ValueError, match="level=3"):
        llm.llm_engine.sleep(3)
    llm.wait_for_completion(use_tqdm=False)
    llm.shutdown()
