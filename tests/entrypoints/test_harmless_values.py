# SPDX-License-Identifier: Apache-2.0
"""Values that mean "nothing" are taken, whatever they are given to; suggestions help or are left out."""

from __future__ import annotations

import argparse

import pytest

from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import parse_prompt
from vllm.utils import FlexibleArgumentParser


@pytest.mark.parametrize(
    "given",
    [
        {"best_of": None},
        {"best_of": 1},
        {"best_of": 3, "n": 3},
        {"guided_decoding": None},
        {"logits_processors": None},
        {"logits_processors": []},
        {"use_beam_search": False},
        {"extra_args": {}},
        {"structured_outputs": None},
    ],
    ids=str,
)
def test_sampling_parameters(given):
    assert SamplingParams(**given) == SamplingParams(n=given.get("n", 1))


@pytest.mark.parametrize(
    "given", [{"best_of": 2}, {"guided_decoding": {"json": "{}"}}, {"use_beam_search": True}, {"extra_args": {"a": 1}}]
)
def test_sampling_parameters_that_ask_for_something(given):
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        SamplingParams(**given)


def test_parameters_are_copied_by_their_field_names():
    """As outlines does."""
    params = SamplingParams(temperature=0.5, max_tokens=3)
    assert SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__}) == params


@pytest.mark.parametrize(
    "given",
    [
        {"limit_mm_per_prompt": {"image": 0, "video": 0}},
        {"task": "generate"},
        {"enable_sleep_mode": True},
        {"download_dir": None},
        {"model_loader_extra_config": {}},
    ],
    ids=str,
)
def test_engine_arguments(given):
    EngineArgs("nowhere", **given)


@pytest.mark.parametrize("given", [{"limit_mm_per_prompt": {"image": 1}}, {"task": "embed"}], ids=str)
def test_engine_arguments_that_ask_for_something(given):
    with pytest.raises(NotImplementedError, match=next(iter(given))):
        EngineArgs("nowhere", **given)


@pytest.mark.parametrize("extra", [{}, {"image": None}, {"image": []}, None], ids=str)
def test_prompt_without_images(extra):
    assert parse_prompt({"prompt": "a", "multi_modal_data": extra, "mm_processor_kwargs": {}}) == ("a", None)
    with pytest.raises(NotImplementedError, match="multi_modal_data"):
        parse_prompt({"prompt": "a", "multi_modal_data": {"image": object()}})


def test_no_adapters(tiny_llama, fake_worker):
    llm = LLM(str(tiny_llama))
    for none in (None, [None], []):
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False, lora_request=none)
    with pytest.raises(NotImplementedError, match="lora_request"):
        llm.generate("a", use_tqdm=False, lora_request=[object()])


@pytest.mark.parametrize("name", ["zzz", "vocabulary", "mode_l_weights_x"])
def test_no_suggestion_where_none_helps(name):
    with pytest.raises(TypeError, match=rf"{name}'$"):
        EngineArgs("nowhere", **{name: 1})


def parse(*argv: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
    return EngineArgs.from_cli_args(parser.parse_args(list(argv)))


def test_command_line_as_upstream_users_write_it():
    args = parse("m", "-tp", "2", "--max_model_len", "32", "--trust_remote_code", "--max_num_seqs=7")
    assert (args.model, args.tensor_parallel_size, args.max_model_len, args.trust_remote_code, args.max_num_seqs) == (
        "m",
        2,
        32,
        True,
        7,
    )
    assert parse("--model", "m").model == "m"
    assert parse("m", "--model", "m").model == "m"
    for wrong in ((), ("m", "--model", "other")):
        with pytest.raises(ValueError, match="model is required"):
            parse(*wrong)


def test_dotted_keys():
    args = parse("m", "--compilation-config.cudagraph_mode", "NONE", "--hf_overrides.rope.theta=2.5")
    assert args.compilation_config == {"cudagraph_mode": "NONE"}
    assert args.hf_overrides == {"rope": {"theta": 2.5}}
    args = parse("m", "--hf-overrides.a.b", "1", "--hf-overrides.a.c", "x.y")
    assert args.hf_overrides == {"a": {"b": 1, "c": "x.y"}}


def test_parser_leaves_other_words_alone():
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_flag", action="store_true")
    parser.add_argument("--text")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(["--my_flag", "--text", "a_b.c", "x_y", "--", "--d_e.f"])
    assert (parsed.my_flag, parsed.text, parsed.rest) == (True, "a_b.c", ["x_y", "--", "--d_e.f"])
