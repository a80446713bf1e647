# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before anything is scheduled, with the value and the remedy, and costs no other request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FakeWorker

from vllm import LLM, LLMEngine, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.tokenizers import get_tokenizer

GOOD = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

NOT_HERE = NotImplementedError
LONG = [0] * 500

# name: (prompt, sampling parameters, error, what its message says)
BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no tokens": ([], {}, ValueError, "prompt is empty.*at least one"),
    "no tokens in a dict": ({"prompt_token_ids": []}, {}, ValueError, "prompt is empty"),
    "as long as the model": ([0] * 512, {}, ValueError, r"has 512 tokens and max_model_len=512.*511 tokens or fewer"),
    "longer than the model": ([0] * 900, {}, ValueError, "has 900 tokens and max_model_len=512"),
    "token id too high": ([1, 260], {}, ValueError, "token id 260, outside the model's vocabulary of 260"),
    "negative token id": ([1, -5], {}, ValueError, r"token id -5.*ids from 0 to 259"),
    "float token id": ([1, 2.5], {}, TypeError, r"holds 2\.5; give a list of integers"),
    "tokens as text": ({"prompt_token_ids": "12"}, {}, TypeError, "is a str; give a list of integers"),
    "number": (3.5, {}, TypeError, "a prompt is a float"),
    "dict without a prompt": ({"text": "hi"}, {}, TypeError, r"keys \['text'\]; give 'prompt' or 'prompt_token_ids'"),
    "image": ({"prompt": "hi", "multi_modal_data": {"image": 1}}, {}, NOT_HERE, "multi_modal_data"),
    "min_tokens too high": (LONG, {"max_tokens": 50, "min_tokens": 20}, ValueError, "min_tokens=20.*room for 12"),
    "min_tokens alone": (LONG, {"max_tokens": None, "min_tokens": 13}, ValueError, "room for 12"),
    "too many logprobs": ([1], {"logprobs": 21}, ValueError, "logprobs=21 exceeds max_logprobs=20"),
    "all logprobs": ([1], {"logprobs": -1}, ValueError, "logprobs=-1 exceeds max_logprobs=20"),
    "too many prompt logprobs": ([1], {"prompt_logprobs": 21}, ValueError, "prompt_logprobs=21 exceeds"),
    "allowed token too high": ([1], {"allowed_token_ids": [3, 260]}, ValueError, r"allowed_token_ids.*260"),
    "biased token too high": ([1], {"logit_bias": {999: 1.0}}, ValueError, r"logit_bias.*999"),
    "stop token too high": ([1], {"stop_token_ids": [261]}, ValueError, r"stop_token_ids.*261"),
}


@pytest.fixture
def llm(tiny_llama: Path, fake_worker: type[FakeWorker]) -> LLM:
    return LLM(str(tiny_llama), max_num_seqs=4)


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_generate_refuses_the_whole_call(llm: LLM, name: str):
    prompt, params, error, message = BAD_REQUESTS[name]
    bad = SamplingParams(**{"max_tokens": 3, **params})
    with pytest.raises(error, match=message):
        llm.generate([[1], [2], prompt, [3]], [GOOD, GOOD, bad, GOOD], use_tqdm=False)
    engine = llm.llm_engine
    assert engine.worker.num_steps == 0, "nothing was scheduled"
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    engine.scheduler.check_integrity()
    (output,) = llm.generate([[7]], GOOD, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [8, 9, 10]


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_add_request_leaves_the_others(llm: LLM, name: str):
    prompt, params, error, message = BAD_REQUESTS[name]
    engine = llm.llm_engine
    engine.add_request("before", [1], GOOD)
    engine.step()
    with pytest.raises(error, match=message):
        engine.add_request("bad", prompt, SamplingParams(**{"max_tokens": 3, **params}))
    engine.add_request("after", [2], GOOD)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert finished == {"before": [2, 3, 4], "after": [3, 4, 5]}


def test_empty_text(tiny_llama: Path, fake_worker: type[FakeWorker], tmp_path: Path):
    """With a tokenizer that begins each text with <s> an empty text is a prompt of one token; without, of none."""
    llm = LLM(str(tiny_llama))
    assert llm.generate("", GOOD, use_tqdm=False)[0].prompt_token_ids == [256]
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate("", GOOD, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"temperature": -1.0},
        {"temperature": 0.0, "n": 2},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"n": 0},
    ],
)
def test_contradictory_sampling_values(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        SamplingParams(**params)


def test_request_id_in_use(llm: LLM):
    engine = llm.llm_engine
    engine.add_request("a", [1], GOOD)
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request("a", [2], GOOD)
    with pytest.raises(TypeError, match="request_id=7"):
        engine.add_request(7, [2], GOOD)  # type: ignore[arg-type]
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert list(outputs[-1].outputs[0].token_ids) == [2, 3, 4], "the first one was not touched"
    engine.add_request("a", [2], GOOD)


def test_request_that_never_fits_the_cache(tiny_llama: Path, fake_worker: type[FakeWorker]):
    llm = LLM(str(tiny_llama), max_model_len=64, num_gpu_blocks_override=5)
    with pytest.raises(ValueError, match=r"max_model_len=65 tokens needs 6 cache blocks.*lower max_model_len to 64"):
        LLM(str(tiny_llama), max_model_len=65, num_gpu_blocks_override=5)
    assert len(llm.generate([[1] * 40], SamplingParams(max_tokens=24, ignore_eos=True), use_tqdm=False)) == 1


def test_number_of_params(llm: LLM):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], [GOOD, GOOD], use_tqdm=False)
    with pytest.raises(TypeError, match="dict"):
        llm.generate([[1]], {"max_tokens": 3}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prompts is a int"):
        llm.generate(5, GOOD, use_tqdm=False)  # type: ignore[arg-type]


def test_what_upstream_has_and_this_engine_does_not(llm: LLM):
    with pytest.raises(NotImplementedError, match="LoRA"):
        LoRARequest("name", 1, "path")
    for kwargs in ({"lora_request": object()}, {"priority": 1}, {"priority": [2]}, {"mm_processor_kwargs": {"a": 1}}):
        with pytest.raises(NotImplementedError, match=next(iter(kwargs))):
            llm.generate([[1]], GOOD, use_tqdm=False, **kwargs)
    llm.generate([[1]], GOOD, use_tqdm=False, priority=[0], lora_request=None)


@pytest.mark.parametrize("make", [EngineArgs.create_engine_config, LLM.from_engine_args, LLMEngine.from_engine_args])
def test_model_that_is_not_there(make, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no/such.*no such file or folder"):
        make(EngineArgs(str(tmp_path / "no/such")))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        make(EngineArgs(str(tmp_path)))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"to load model\.gguf"):
        make(EngineArgs(str(tmp_path)))
    with pytest.raises(ValueError, match=r"model\.gguf is truncated"):
        make(EngineArgs(str(tmp_path / "model.gguf")))


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no-such-model"}', '{"architectures": ["X"]}'])
def test_unreadable_config(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        EngineArgs(str(tmp_path)).create_engine_config()


def test_config_without_architecture(tiny_llama: Path, tmp_path: Path):
    """Its model type decides; one that is not served is named."""
    config = json.loads((tiny_llama / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(str(tmp_path))
    assert args.create_engine_config().model_config.architecture == "LlamaForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    with pytest.raises(ValueError, match="type 'gemma' names no architecture"):
        EngineArgs(str(tmp_path)).create_engine_config()
    given = EngineArgs(str(tmp_path), hf_overrides={"architectures": ["LlamaForCausalLM"]})
    assert given.create_engine_config().model_config.architecture == "LlamaForCausalLM"


def test_unreadable_generation_config(tiny_llama: Path, tmp_path: Path):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    args = EngineArgs(str(tmp_path))
    with pytest.raises(ValueError, match=r"generation_config\.json is no JSON"):
        args.get_generation_config(args.create_model_config())
    args = EngineArgs(str(tmp_path), generation_config=str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        args.get_generation_config(args.create_model_config())


def test_unreadable_tokenizer(tiny_llama: Path, fake_worker: type[FakeWorker], tmp_path: Path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_llama, folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    for make in (get_tokenizer, lambda path: LLM(str(path))):
        with pytest.raises(ValueError, match=r"(?s)tokenizer of .*broken.* cannot .*skip_tokenizer_init=True"):
            make(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        get_tokenizer(folder)
    assert LLM(str(folder), skip_tokenizer_init=True).generate([[1]], GOOD, use_tqdm=False)
    with pytest.raises(NotImplementedError, match="mistral"):
        get_tokenizer(tiny_llama, tokenizer_mode="mistral")
