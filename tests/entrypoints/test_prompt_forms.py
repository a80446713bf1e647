# SPDX-License-Identifier: Apache-2.0
"""Prompts as people pass them, what is refused by name, requests that nothing can be drawn for, and metrics."""

from __future__ import annotations

import array
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fakes import FakeWorker

from vllm import LLM, SamplingParams
from vllm.inputs import parse_prompt, split_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


class Series:
    """As of pandas."""

    def __init__(self, values) -> None:
        self.values = values

    def tolist(self) -> list:
        return list(self.values)


class Frame:
    columns = ("a",)

    def __iter__(self):
        return iter(self.columns)


def parsed(prompts) -> list:
    return [parse_prompt(one) for one in split_prompts(prompts)]


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([5, 6]),
        np.array([5, 6], dtype=np.uint8),
        torch.tensor([5, 6]),
        (5, 6),
        range(5, 7),
        array.array("i", [5, 6]),
        pytest.param(Series([5, 6]), id="Series"),
        [torch.tensor(5), np.int64(6)],
        [np.array(5), 6],
    ],
    ids=repr,
)
def test_token_ids(prompt):
    """As the only prompt, among others, and in a dict: Python integers come out."""
    for prompts in (prompt, [prompt], (prompt,), [{"prompt_token_ids": prompt}], {"prompt_token_ids": prompt}):
        ((text, ids),) = parsed(prompts)
        assert (text, ids) == (None, [5, 6])
        assert all(type(token) is int for token in ids)


def test_generators_and_several_prompts():
    assert parsed(i for i in (5, 6)) == [(None, [5, 6])]
    assert parse_prompt({"prompt_token_ids": iter([5, 6])}) == (None, [5, 6])
    for several in (np.array([[5, 6], [7, 8]]), torch.tensor([[5, 6], [7, 8]]), Series([np.array([5, 6]), (7, 8)])):
        assert parsed(several) == [(None, [5, 6]), (None, [7, 8])]
    for several in (("a", "b"), (t for t in "ab"), np.array(["a", "b"]), Series(["a", "b"])):
        assert parsed(several) == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (np.array([1.5, 2.0]), "a prompt is a float"),
        ([np.array([1.5])], r"holds 1\.5"),
        ([torch.tensor([[1, 2]])], r"holds \[1, 2\]"),
        ([np.array([True])], "holds True"),
        ({"a", "b"}, "prompts is a set"),
        (Frame(), "prompts is a Frame"),
        (b"ab", "a prompt is a bytes"),
        ([None], "a prompt is a NoneType"),
        (5, "prompts is a int"),
    ],
)
def test_what_is_no_prompt(prompts, message):
    with pytest.raises(TypeError, match=message):
        parsed(prompts)


@pytest.fixture
def llm(tiny_llama: Path, fake_worker: type[FakeWorker]) -> LLM:
    return LLM(str(tiny_llama), max_num_seqs=4)


def test_surrogates_are_named(llm: LLM):
    with pytest.raises(ValueError, match=r"the prompt holds the surrogate '.ud83d' at character 2.*surrogatepass"):
        llm.generate("ab\ud83d", GREEDY, use_tqdm=False)
    assert "\ud83d\ude00\ud83d".encode("utf-16", "surrogatepass").decode("utf-16", "replace") == "😀\ufffd", (
        "the remedy"
    )
    for name in ("stop", "bad_words"):
        with pytest.raises(ValueError, match=f"{name} holds the surrogate"):
            SamplingParams(**{name: ["a\ud83d"]})


def test_tokenization_kwargs(llm: LLM):
    ids = llm.get_tokenizer()("abcdefgh").input_ids
    for prompt in ("abcdefgh", ids):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 5})
        assert output.prompt_token_ids == ids[-5:]
    (output,) = llm.generate("abc", GREEDY, use_tqdm=False, tokenization_kwargs={"padding": False, "truncation": None})
    assert output.prompt_token_ids == ids[:4]
    said = [{"role": "user", "content": "hi"}]
    (whole,) = llm.chat(said, GREEDY, use_tqdm=False)
    (output,) = llm.chat(said, GREEDY, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert output.prompt_token_ids == whole.prompt_token_ids[-2:]
    (output,) = llm.chat(said, GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": True})
    assert output.prompt_token_ids == [256, *whole.prompt_token_ids]
    for kwargs, message in (
        ({"truncate_prompts": 5}, "truncate_prompts.*it may have add_special_tokens.*truncate_prompt_tokens"),
        ({"return_tensors": "pt"}, "return_tensors"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    ):
        for call in (llm.generate, llm.chat):
            with pytest.raises(ValueError, match=message):
                call(said if call == llm.chat else "a", GREEDY, use_tqdm=False, tokenization_kwargs=kwargs)


def test_metrics(tiny_llama: Path, fake_worker: type[FakeWorker], llm: LLM):
    assert llm.generate([[1]], GREEDY, use_tqdm=False)[0].metrics is None
    llm = LLM(str(tiny_llama), max_num_seqs=1, disable_log_stats=False)
    wall, start = time.time(), time.monotonic()
    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    first, second = (output.metrics for output in llm.generate([[1], [2]], [params, GREEDY], use_tqdm=False))
    end = time.monotonic()
    assert wall <= first.arrival_time <= second.arrival_time <= time.time()
    for metrics, tokens in ((first, 6), (second, 2)):
        assert metrics.num_generation_tokens == tokens
        times = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        assert start <= times[0] < times[1] < times[2] < times[3] <= end
        assert 0 < metrics.first_token_latency <= end - start + 0.1
    assert second.scheduled_ts > first.first_token_ts, "it waited for its turn"


def test_infinite_bias_is_the_largest():
    assert SamplingParams(logit_bias={1: -math.inf, 2: math.inf}).logit_bias == {1: -100.0, 2: 100.0}


def generate(llm: LLM, *params: SamplingParams) -> list:
    return [output.outputs[0] for output in llm.generate([[7, 8, 9]] * len(params), list(params), use_tqdm=False)]


def test_only_the_request_that_nothing_can_be_drawn_for_ends(tiny_llama: Path):
    """On a real model: bans that leave nothing, at the first position and later, beside requests that go on."""
    llm = LLM(str(tiny_llama), dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=2**22)
    others = [GREEDY, SamplingParams(seed=5, max_tokens=4, ignore_eos=True, allowed_token_ids=[3, 4, 5])]
    alone = [list(one.token_ids) for one in generate(llm, *others)]
    a = llm.get_tokenizer().convert_tokens_to_ids("a")
    bad = [
        SamplingParams(max_tokens=4, allowed_token_ids=[a], bad_words=["a"]),
        SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[a], bad_words=["aaa"]),
        SamplingParams(seed=1, max_tokens=4, min_tokens=2, allowed_token_ids=[257, 3], stop_token_ids=[3]),
    ]
    broken, later, ends, *rest = generate(llm, *bad, *others)
    assert [list(one.token_ids) for one in rest] == alone
    assert [one.finish_reason for one in (broken, later, ends)] == ["error"] * 3
    assert list(broken.token_ids) == list(ends.token_ids) == []
    assert list(later.token_ids) == [a, a]
    assert "position 0: allowed_token_ids" in broken.stop_reason
    assert "position 2" in later.stop_reason
    assert "min_tokens=2 forbids the end tokens" in ends.stop_reason
    several = SamplingParams(n=2, seed=1, max_tokens=4, allowed_token_ids=[a], bad_words=["aa"])
    (output,) = llm.generate([[1]], several, use_tqdm=False)
    assert [(one.finish_reason, list(one.token_ids)) for one in output.outputs] == [("error", [a])] * 2
    assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.scheduler.check_integrity()
