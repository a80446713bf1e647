# SPDX-License-Identifier: Apache-2.0
"""What llama-index, outlines and langchain send to the engine; with the mark ``clients``, these themselves."""

from __future__ import annotations

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
    with pytest.raises(NotImplementedError, match="StructuredOutputsParams"):
        SamplingParams(**{**fields, "structured_outputs": StructuredOutputsParams(json="{}")})


@pytest.mark.clients
def test_llama_index(tiny_llama, fake_worker):
    base = pytest.importorskip("llama_index.llms.vllm")
    client = base.Vllm(model=str(tiny_llama), dtype="auto", max_new_tokens=4, temperature=0.0)
    assert client.complete("abc").text == greedy_text(client._client, 4)


@pytest.mark.clients
def test_outlines(tiny_llama, fake_worker):
    outlines = pytest.importorskip("outlines")
    llm = LLM(str(tiny_llama))
    model = outlines.from_vllm_offline(llm)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert model("abc", sampling_params=params) == greedy_text(llm, 4)
    with pytest.raises(NotImplementedError, match="StructuredOutputsParams"):
        model("abc", output_type=int, sampling_params=params)


@pytest.mark.clients
def test_langchain(tiny_llama, fake_worker):
    llms = pytest.importorskip("langchain_community.llms")
    client = llms.VLLM(model=str(tiny_llama), max_new_tokens=4, temperature=0.0, top_k=-1)
    assert client.invoke("abc") == greedy_text(client.client, 4)
