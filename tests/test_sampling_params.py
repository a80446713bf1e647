# SPDX-License-Identifier: Apache-2.0
"""Defaults, checks and copies of the sampling parameters."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace

import pytest

from vllm.sampling_params import _UNSUPPORTED, RequestOutputKind, SamplingParams


def test_defaults_are_upstreams():
    params = SamplingParams()
    expected = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "bad_words": [],
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "logit_bias": None,
        "allowed_token_ids": None,
    }
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 1.5},
        {"n": 2, "temperature": 0},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": None},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 2.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"seed": "7"},
        {"seed": 2**64},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": "a", "detokenize": False},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [-1]},
        {"bad_words": [""]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {1: math.nan}},
        {"allowed_token_ids": []},
        {"truncate_prompt_tokens": 0},
        {"output_kind": "delta"},
    ],
    ids=str,
)
def test_wrong_values_are_named(wrong):
    with pytest.raises(ValueError) as error:
        SamplingParams(**wrong)
    assert next(iter(wrong)) in str(error.value)


def test_unknown_names_are_told_the_nearest():
    with pytest.raises(TypeError, match=r"'temprature'.*'temperature'"):
        SamplingParams(temprature=1)


def test_unsupported_names():
    """Their defaults are accepted, other values and retired names are not."""
    SamplingParams(structured_outputs=None, flat_logprobs=False)
    for name in _UNSUPPORTED:
        with pytest.raises(NotImplementedError, match=name):
            SamplingParams(**{name: 7})
    with pytest.raises(NotImplementedError, match="logits_processors"):
        SamplingParams(logits_processors=[print])


def test_values_are_brought_to_one_form():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop_token_ids=[3, 3, 1]).stop_token_ids == [3, 1]
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(logit_bias={"3": 200, 4: -200}).logit_bias == {3: 100.0, 4: -100.0}
    assert SamplingParams(temperature=1e-3).temperature == 1e-2
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=4, min_p=0.1)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)


def test_from_optional():
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None, stop=None)
    assert params == SamplingParams(top_p=0.5, max_tokens=None)


def test_a_clone_is_independent():
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, stop_token_ids=[5])
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0
    clone.stop_token_ids.append(6)
    clone.max_tokens = 3
    assert params == SamplingParams(stop=["a"], logit_bias={1: 1.0}, stop_token_ids=[5])


def test_lists_of_the_caller_are_not_kept():
    stop = ["a"]
    SamplingParams(stop=stop).stop.append("b")
    assert stop == ["a"]


def test_printing_and_pickling():
    params = SamplingParams(temperature=0, stop=["x"])
    assert repr(params) == "SamplingParams(temperature=0.0, stop=['x'])"
    assert pickle.loads(pickle.dumps(params)) == params


def test_verify_against_a_model():
    SamplingParams(stop_token_ids=[9], logprobs=20).verify(vocab_size=10, max_logprobs=20)
    SamplingParams(logprobs=-1).verify(vocab_size=10, max_logprobs=-1)
    for wrong in ({"stop_token_ids": [10]}, {"allowed_token_ids": [1, 11]}, {"logit_bias": {12: 1}}):
        with pytest.raises(ValueError, match="vocabulary of 10"):
            SamplingParams(**wrong).verify(vocab_size=10)
    for wrong in ({"logprobs": 21}, {"prompt_logprobs": -1}):
        with pytest.raises(ValueError, match="max_logprobs=20"):
            SamplingParams(**wrong).verify(vocab_size=100, max_logprobs=20)


def test_bad_words_with_and_without_a_space():
    """A word that begins a text is another token than after a space."""
    ids = {"bad": [1], " bad": [2], "two words": [3, 4], " two words": [5, 4]}
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: ids[text])
    params = SamplingParams(bad_words=["bad", " two words"])
    params.update_from_tokenizer(tokenizer)
    assert params.bad_words_token_ids == [[1], [2], [3, 4], [5, 4]]
