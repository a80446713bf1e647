# SPDX-License-Identifier: Apache-2.0
"""What comes over HTTP is what ``LLM`` gives, streamed or not; log-probabilities are transformers'."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from http_server import ENGINE_ARGS, Server, serving

from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.serving_completion import ServingCompletion
from vllm.logprobs import Logprob

PROMPT = "the sea is"
MESSAGES = [{"role": "user", "content": "say a word"}]


@pytest.fixture(scope="module")
def llm(char_llama: Path) -> Iterator[LLM]:
    llm = LLM(str(char_llama), **ENGINE_ARGS)
    yield llm
    llm.shutdown()


def joined(events: list[dict[str, Any]]) -> dict[int, tuple[str, str, Any]]:
    """(text, finish_reason, stop_reason) of each choice of a stream."""
    texts: dict[int, tuple[str, Any, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            before, ended, _ = texts.get(choice["index"], ("", None, None))
            assert ended is None, "a choice goes on after its end"
            texts[choice["index"]] = (before + piece, choice["finish_reason"], choice.get("stop_reason"))
    return texts


def whole(answer: dict[str, Any]) -> dict[int, tuple[str, str, Any]]:
    texts = {}
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        texts[choice["index"]] = (text, choice["finish_reason"], choice["stop_reason"])
    return texts


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "seeded": {"seed": 7, "max_tokens": 12},
    "several": {"seed": 7, "n": 3, "max_tokens": 6},
    "filters": {"seed": 1, "temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "max_tokens": 16},
    "filters off": {"seed": 2, "top_k": 10**30, "min_p": 0.0, "top_p": 1.0, "max_tokens": 6},
    "penalties": {
        "temperature": 0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "max_tokens": 16,
    },
    "ends": {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stop_token_ids": [72, 75], "min_tokens": 4},
    "bias": {"temperature": 0, "max_tokens": 5, "logit_bias": {"33": 100}},
    "allowed": {"seed": 3, "max_tokens": 9, "allowed_token_ids": [64, 65, 66, 67], "bad_words": ["ab"]},
    "truncated": {"temperature": 0, "max_tokens": 8, "truncate_prompt_tokens": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_llm(server: Server, llm: LLM, case: str):
    fields = CASES[case]
    (expected,) = llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    right = {c.index: (c.text, c.finish_reason, c.stop_reason) for c in expected.outputs}
    body = {"model": "chars", "prompt": PROMPT, **fields}
    answer = server.post("/v1/completions", body)
    assert whole(answer) == right
    assert joined(server.stream("/v1/completions", body)) == right
    tokens = sum(len(c.token_ids) for c in expected.outputs)
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["total_tokens"] == tokens + len(expected.prompt_token_ids)
    assert (answer["object"], answer["model"]) == ("text_completion", "chars")


@pytest.mark.parametrize("case", CASES)
def test_chats_are_those_of_llm(server: Server, llm: LLM, case: str):
    fields = CASES[case]
    (expected,) = llm.chat(MESSAGES, SamplingParams(**fields), use_tqdm=False)
    right = {c.index: (c.text, c.finish_reason, c.stop_reason) for c in expected.outputs}
    body = {"model": "chars", "messages": MESSAGES, **fields}
    body["max_completion_tokens"] = body.pop("max_tokens")
    assert whole(server.post("/v1/chat/completions", body)) == right
    events = server.stream("/v1/chat/completions", body)
    assert joined(events) == right
    first = {}
    for event in events:
        for choice in event["choices"]:
            first.setdefault(choice["index"], choice["delta"])
    assert all(delta == {"role": "assistant", "content": ""} for delta in first.values())


def test_stop_strings(server: Server, llm: LLM):
    """They end the text before them, or after with ``include_stop_str_in_output``; nothing of them is streamed."""
    text = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0].outputs[0].text
    stop = text[9:12]
    place = text.index(stop)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stop": [stop, "\x7f"]}
    for kept in (False, True):
        right = {0: (text[: place + (len(stop) if kept else 0)], "stop", stop)}
        asked = {**body, "include_stop_str_in_output": kept}
        assert whole(server.post("/v1/completions", asked)) == right
        assert joined(server.stream("/v1/completions", asked)) == right


def test_prompts_in_all_forms(server: Server, llm: LLM):
    """Texts and token lists, one or many; the choices of prompt p are p * n and the next."""
    texts = ["one", "two and more", "3"]
    ids = [llm.get_tokenizer()(text).input_ids for text in texts]
    params = SamplingParams(n=2, seed=5, max_tokens=5)
    outputs = llm.generate(texts, params, use_tqdm=False)
    right = {
        2 * number + c.index: (c.text, c.finish_reason, c.stop_reason)
        for number, output in enumerate(outputs)
        for c in output.outputs
    }
    body = {"n": 2, "seed": 5, "max_tokens": 5}
    for prompt in (texts, ids):
        answer = server.post("/v1/completions", {"prompt": prompt, **body})
        assert whole(answer) == right
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert joined(server.stream("/v1/completions", {"prompt": prompt, **body})) == right
    for prompt in (texts[1], ids[1]):
        answer = whole(server.post("/v1/completions", {"prompt": prompt, **body}))
        assert [answer[0], answer[1]] == [right[2], right[3]]


def reference(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Row i: the log-probabilities of token i + 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def test_log_probabilities_of_an_echoed_prompt(server: Server, llm: LLM, char_llama: Path):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(PROMPT).input_ids
    body = {"prompt": ids, "temperature": 0, "max_tokens": 2, "echo": True, "logprobs": 2, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", body)["choices"]
    all_ids = ids + choice["token_ids"]
    rows = reference(char_llama, all_ids)
    given = choice["logprobs"]
    assert choice["text"] == PROMPT + tokenizer.decode(choice["token_ids"])
    assert choice["prompt_token_ids"] == ids
    assert given["tokens"] == [tokenizer.decode([i]) for i in all_ids]
    assert given["token_logprobs"][0] is given["top_logprobs"][0] is None
    right = [float(rows[place, token]) for place, token in enumerate(all_ids[1:])]
    assert given["token_logprobs"][1:] == pytest.approx(right, abs=1e-4)
    for place, top in enumerate(given["top_logprobs"][1:]):
        best = rows[place].topk(2)
        likeliest = {tokenizer.decode([int(i)]): float(v) for v, i in zip(*best, strict=True)}
        likeliest[given["tokens"][place + 1]] = right[place]
        assert top == pytest.approx(likeliest, abs=1e-4)
    assert given["text_offset"] == list(range(len(all_ids)))
    # Only the prompt; a stream gives the same in pieces.
    only = server.post("/v1/completions", {**body, "max_tokens": 0})
    assert only["choices"][0]["text"] == PROMPT
    assert only["choices"][0]["logprobs"]["token_logprobs"] == given["token_logprobs"][: len(ids)]
    assert only["usage"]["completion_tokens"] == 0
    pieces = [e["choices"][0]["logprobs"] for e in server.stream("/v1/completions", body)]
    assert {name: functools.reduce(operator.iadd, (piece[name] for piece in pieces), []) for name in given} == given
    assert len(pieces) == 2


def test_each_choice_of_a_stream_begins_with_the_echoed_prompt(server: Server):
    body = {"prompt": PROMPT, "max_tokens": 3, "n": 3, "seed": 2, "echo": True, "logprobs": 0}
    right = server.post("/v1/completions", body)["choices"]
    pieces: dict[int, list[float]] = {}
    for event in server.stream("/v1/completions", body):
        for choice in event["choices"]:
            pieces.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert [pieces[choice["index"]] for choice in right] == [choice["logprobs"]["token_logprobs"] for choice in right]
    assert all(len(rows) == len(PROMPT) + 3 for rows in pieces.values())


def test_log_probabilities_of_chats(server: Server, llm: LLM, char_llama: Path):
    body = {"messages": MESSAGES, "temperature": 1.0, "seed": 4, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    answer = server.post("/v1/chat/completions", {**body, "return_token_ids": True, "prompt_logprobs": 1})
    (choice,) = answer["choices"]
    prompt_ids, ids = answer["prompt_token_ids"], choice["token_ids"]
    rows = reference(char_llama, prompt_ids + ids)
    content = choice["logprobs"]["content"]
    text = choice["message"]["content"]
    assert bytes(b for token in content for b in token["bytes"]).decode() == text
    tokenizer = llm.get_tokenizer()
    for place, token in enumerate(content):
        row = rows[len(prompt_ids) - 1 + place]
        assert token["logprob"] == pytest.approx(float(row[ids[place]]), abs=1e-4)
        best = row.topk(3)
        assert [top["token"] for top in token["top_logprobs"]] == [tokenizer.decode([int(i)]) for i in best.indices]
        assert [top["logprob"] for top in token["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert answer["prompt_logprobs"][0] is None
    for place, entries in enumerate(answer["prompt_logprobs"][1:]):
        assert entries[str(prompt_ids[place + 1])]["logprob"] == pytest.approx(
            float(rows[place, prompt_ids[place + 1]]), abs=1e-4
        )
    pieces = [e["choices"][0]["logprobs"] for e in server.stream("/v1/chat/completions", body)]
    assert functools.reduce(operator.iadd, (piece["content"] for piece in pieces if piece), []) == content
    as_ids = server.post("/v1/chat/completions", {**body, "return_tokens_as_token_ids": True})
    assert [t["token"] for t in as_ids["choices"][0]["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]


def test_log_probabilities_are_not_given_unasked(server: Server):
    body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "temperature": 0}
    content = server.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[], []]
    assert server.post("/v1/chat/completions", {**body, "logprobs": False})["choices"][0]["logprobs"] is None


def test_usage_in_streams(server: Server):
    body = {"prompt": "x" * 40, "max_tokens": 4, "ignore_eos": True}
    kinds = [
        ("/v1/completions", body),
        ("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "y" * 40}], "prompt": None}),
    ]
    for path, asked in kinds:
        asked = {name: value for name, value in asked.items() if value is not None}
        assert all("usage" not in event for event in server.stream(path, asked))
        *events, last = server.stream(path, {**asked, "stream_options": {"include_usage": True}})
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert all(event["choices"] for event in events)
        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [
            event["usage"]["completion_tokens"] for event in server.stream(path, {**asked, "stream_options": options})
        ]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert set(counts) >= {1, 2, 3, 4}


def test_cached_tokens_are_told(server: Server):
    body = {"prompt": "a prompt that nobody else has " * 3, "max_tokens": 1}
    details = [server.post("/v1/completions", body)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details[0] == {"cached_tokens": 0}
    assert details[1]["cached_tokens"] == 80, "all full blocks of 16 before the last token of 90"


def test_templates(server: Server, llm: LLM):
    """What the conversation becomes is what transformers' template says."""
    tokenizer = llm.get_tokenizer()
    last = [*MESSAGES, {"role": "assistant", "content": "Sure: "}]

    def prompt_of(**fields: Any) -> list[int]:
        return server.post("/tokenize", fields)["tokens"]

    for messages, options in (
        (MESSAGES, {}),
        (MESSAGES, {"add_generation_prompt": False}),
        (last, {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
        right = tokenizer(text, add_special_tokens=False).input_ids
        assert prompt_of(messages=messages, **options) == right
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **options}
        assert server.post("/v1/chat/completions", body)["prompt_token_ids"] == right
    echoed = {"add_generation_prompt": False, "continue_final_message": True, "echo": True, "temperature": 0}
    answer = server.post("/v1/chat/completions", {"messages": last, "max_tokens": 3, **echoed})
    assert answer["choices"][0]["message"]["content"].startswith("Sure: ")
    assert len(answer["choices"][0]["message"]["content"]) == len("Sure: ") + 3
    events = server.stream("/v1/chat/completions", {"messages": last, "max_tokens": 3, **echoed})
    assert joined(events)[0][0] == answer["choices"][0]["message"]["content"]


def test_tokenize_and_back(server: Server, llm: LLM):
    right = llm.get_tokenizer()("a b").input_ids
    answer = server.post("/tokenize", {"prompt": "a b", "return_token_strs": True})
    assert answer["tokens"] == right
    assert answer["count"] == 3
    assert answer["max_model_len"] == 512
    assert answer["token_strs"] == ["a", "\u0120", "b"]
    assert server.post("/detokenize", {"tokens": right}) == {"prompt": "a b"}


def test_small_paths(server: Server):
    import vllm

    http = server.http
    assert http.get("/health").status_code == http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/version").json() == {"version": vllm.__version__}
    assert http.get("/load").json() == {"server_load": 0}
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["parent"]) == ("chars", 512, None)
    assert http.get("/v1/models/chars").json() == card


def test_the_models_defaults(char_llama: Path, engine: Any, monkeypatch: pytest.MonkeyPatch):
    """generation_config.json's values are for what a request leaves out, and its max_new_tokens is the most for all."""
    monkeypatch.setattr(engine, "generation_config", {"top_k": 1, "max_new_tokens": 5, "temperature": 0.7})
    with serving(engine) as server:
        greedy = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0})
        answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12})
        assert whole(answer) == whole(greedy)
        assert answer["usage"]["completion_tokens"] == 5
        chat = server.post("/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": True})
        assert chat["usage"]["completion_tokens"] == 5


def test_openai_client(server: Server, llm: LLM):
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    right = expected.outputs[0].text
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["chars"]
        assert client.models.retrieve("chars").id == "chars"
        chat = client.chat.completions.create(model="chars", messages=MESSAGES, temperature=0, max_tokens=8)  # type: ignore[call-overload]
        assert chat.choices[0].message.content == right
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model="chars",
            messages=MESSAGES,
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == right
        assert chunks[-1].usage.completion_tokens == len(expected.outputs[0].token_ids)
        text = client.completions.create(model="chars", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=1)
        assert len(text.choices[0].logprobs.tokens) == 4  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature=-1"):
            client.completions.create(model="chars", prompt="x", temperature=-1)


def test_openai_client_async(server: Server, llm: LLM):
    import asyncio

    expected = llm.generate([PROMPT, "b"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(
                    model="chars", prompt=prompt, temperature=0, max_tokens=8, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(one(PROMPT), one("b")))

    assert asyncio.run(run()) == [output.outputs[0].text for output in expected]


def test_tokens_of_one_text():
    """OpenAI's form names tokens by their text: of several, the likeliest counts, or clients take the chosen for it."""
    serving = SimpleNamespace(token_name=lambda token_id, logprob, request: logprob.decoded_token)
    row = {5: Logprob(-2.0, 2, "a"), 7: Logprob(-1.0, 1, "a"), 8: Logprob(float("-inf"), 3, "b")}
    given = ServingCompletion(serving)._logprobs(None, [5], [row], 0)  # type: ignore[arg-type]
    assert given["token_logprobs"] == [-2.0]
    assert given["top_logprobs"] == [{"a": -1.0, "b": -9999.0}]
    given = ServingCompletion(serving)._logprobs(None, [7], [{7: row[7], 5: row[5]}], 0)  # type: ignore[arg-type]
    assert given["top_logprobs"] == [{"a": -1.0}]
