# SPDX-License-Identifier: Apache-2.0
"""What llama-index, outlines and langchain send to the engine; with the mark ``clients``, these themselves.

The calls meet an engine that counts; the clients run a tiny model, and the right text is transformers'.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def greedy_text(llm: LLM, num_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    return llm.generate(["abc"], params, use_tqdm=False)[0].outputs[0].text


def test_calls_of_llama_index(tiny_llama, fake_worker):
    llm = LLM(model=str(tiny_llama), tensor_parallel_size=1, trust_remote_code=True, dtype="auto", download_dir=None)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        n=1,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        best_of=None,
        ignore_eos=False,
        stop=None,
        logprobs=None,
        top_k=-1,
        top_p=1.0,
    )
    assert llm.generate(["abc"], params)[0].outputs[0].text == greedy_text(llm, 4)


def test_calls_of_outlines(tiny_llama, fake_worker):
    llm = LLM(str(tiny_llama))
    assert llm.get_tokenizer().chat_template is None or llm.get_tokenizer().chat_template
    params = SamplingParams(temperature=0, max_tokens=4)
    fields: dict[str, Any] = {name: getattr(params, name) for name in params.__struct_fields__}
    copy = SamplingParams(**{**fields, "structured_outputs": None})
    assert llm.generate(prompts="abc", sampling_params=copy)[0].outputs[0].text == greedy_text(llm, 4)
    held = SamplingParams(**{**fields, "structured_outputs": StructuredOutputsParams(json="{}")})
    assert held.structured_outputs.json == "{}"


# -- the clients themselves: one that is not installed is an error here


def right_text(folder: Path, num_tokens: int, chat: bool = False) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    if chat:
        messages = [{"role": "user", "content": "abc"}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer("abc", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.clients
def test_llama_index(tiny_llama):
    from llama_index.llms.vllm import Vllm

    client = Vllm(model=str(tiny_llama), dtype="float32", max_new_tokens=12, temperature=0.0)
    assert client.complete("abc").text == right_text(tiny_llama, 12)


@pytest.mark.clients
def test_outlines(tiny_llama):
    import outlines

    model = outlines.from_vllm_offline(LLM(str(tiny_llama), dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=12)
    right = right_text(tiny_llama, 12, chat=True)  # as outlines sends text to a model that has a template
    assert model("abc", sampling_params=params) == right
    assert model.batch(["abc", "abc"], sampling_params=params) == [[right]] * 2
    assert not re.fullmatch("[+-]?[0-9]+", right)
    assert re.fullmatch("[+-]?[0-9]+", model("abc", output_type=int, sampling_params=params))


@pytest.mark.clients
def test_langchain(tiny_llama):
    from langchain_community.llms import VLLM

    client = VLLM(model=str(tiny_llama), dtype="float32", max_new_tokens=12, temperature=0.0, top_k=-1)
    assert client.invoke("abc") == right_text(tiny_llama, 12)
    assert client.batch(["abc", "abc"]) == [right_text(tiny_llama, 12)] * 2
