# SPDX-License-Identifier: Apache-2.0
"""Outputs held to a grammar: what a random model writes is read by json, re and by hand, never by what made it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_fakes import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.messages import Add, params_from_the_wire, params_on_the_wire
from vllm.v1.request import Request
from vllm.v1.sample.metadata import AllowedTokens, SamplingMetadata
from vllm.v1.sample.sampler import process_logits
from vllm.v1.structured_output import MAX_GRAMMAR_BYTES, Grammars, as_text

EOS, USER, ASSISTANT = 257, 258, 259  # of the byte tokenizer
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bé"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASCII = {**PERSON, "properties": {**PERSON["properties"], "tags": {"enum": ["a", "b"]}}}  # type: ignore[dict-item]
TIGHT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Any:
    engine = LLM(
        str(tiny_llama), dtype="float32", max_model_len=320, max_num_seqs=8, max_num_batched_tokens=32,
        num_gpu_blocks_override=300,
    )  # fmt: skip
    yield engine
    engine.shutdown()


def run(llm: Any, *params: SamplingParams, prompt: str = "hello") -> list[Any]:
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    llm.llm_engine.scheduler.check_integrity()
    return [output.outputs[0] for output in outputs]


def held(seed: int = 0, **structured: Any) -> SamplingParams:
    sampling = {key: structured.pop(key) for key in list(structured) if key not in vars(StructuredOutputsParams)}
    given = {"temperature": 1.0, "max_tokens": 150, "seed": seed, **sampling}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**structured), **given)


def fits(schema: Any, value: Any) -> bool:
    """Whether ``value`` is what the small schemas of these tests describe."""
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        known, required = schema["properties"], schema["required"]
        return (
            isinstance(value, dict)
            and set(required) <= set(value) <= set(known)
            and all(fits(known[name], each) for name, each in value.items())
        )
    if kind == "array":
        fit = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fit and all(fits(schema["items"], each) for each in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return {"boolean": bool, "null": type(None)}[kind] is type(value)


REGEX = r"(ab|c){2,5}-\d{3}é?"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("structured", "is_right"),
    [
        ({"json": PERSON, **TIGHT}, lambda text: fits(PERSON, json.loads(text)) and not re.search(r"\s", text)),
        ({"json": json.dumps(PERSON), "whitespace_pattern": " ?"}, lambda text: fits(PERSON, json.loads(text))),
        ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"regex": f"^{REGEX}$"}, lambda text: re.fullmatch(REGEX, text)),
        ({"choice": ["red", "redder", 'b"l\\ue\n', "déjà"]}, {"red", "redder", 'b"l\\ue\n', "déjà"}.__contains__),
        ({"grammar": 'start: "(" start ")" | "x"~2 /[0-9]/'}, lambda text: re.fullmatch(r"(\(*)xx\d(\)*)", text)),
        ({"grammar": 'root ::= "yes" | "no" [a-c]'}, lambda text: re.fullmatch("yes|no[a-c]", text)),
    ],
)
def test_each_kind(llm: Any, structured: dict[str, Any], is_right: Any, temperature: float) -> None:
    seeds = range(3 if temperature else 1)
    for completion in run(llm, *(held(seed, temperature=temperature, **structured) for seed in seeds)):
        assert completion.finish_reason == "stop", completion
        assert is_right(completion.text), completion.text
        assert completion.token_ids[-1] == EOS


def test_json_object(llm: Any) -> None:
    """A random model ends no object by itself: half of the bytes are forbidden it."""
    bias = dict.fromkeys(map(int, byte_tokenizer()("}", add_special_tokens=False).input_ids), 50.0)
    completions = run(llm, *(held(seed, json_object=True, logit_bias=bias, **TIGHT) for seed in range(4)))
    assert all(isinstance(json.loads(completion.text), dict) for completion in completions)


LEAVES = st.one_of(
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 3)),
    st.tuples(st.integers(-300, 300), st.integers(0, 400)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.lists(st.one_of(st.text(max_size=3), st.integers(-9, 9), st.none()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def _object(members: list[tuple[str, Any, bool]]) -> dict[str, Any]:
    properties = {name: schema for name, schema, _ in members}
    required = sorted({name for name, _, needed in members if needed})
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(st.tuples(st.text('abé" \\', max_size=2), inner, st.booleans()), max_size=3).map(_object),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 1)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=8))
def test_any_small_schema(llm: Any, schemas: list[Any]) -> None:
    params = [held(7, json=schema, max_tokens=280, **TIGHT) for schema in schemas]
    for schema, completion in zip(schemas, run(llm, *params), strict=True):
        assert completion.finish_reason == "stop", (schema, completion.text)
        assert fits(schema, json.loads(completion.text)), (schema, completion.text)


def test_rows_do_not_touch_each_other(llm: Any) -> None:
    """Free rows and rows of a grammar in one batch get what they get alone; and log-probabilities are the model's."""
    free = SamplingParams(temperature=1.0, max_tokens=20, seed=5, ignore_eos=True, logprobs=5)
    bound = held(3, regex=REGEX, logprobs=5)
    other = held(3, regex="[xyz]{9}")
    alone = [run(llm, params)[0] for params in (free, bound, other)]
    together = run(llm, bound, free, other, free)
    assert [c.token_ids for c in together] == [alone[i].token_ids for i in (1, 0, 2, 0)]
    first_free, first_bound = (sorted(c.logprobs[0].items()) for c in alone[:2])
    likeliest = {t: lp.logprob for t, lp in first_free if lp.rank <= 5}
    assert {t: lp.logprob for t, lp in first_bound if lp.rank <= 5} == pytest.approx(likeliest)


def test_preempted_and_cut_and_many(tiny_llama: Path, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache too small for all, prompts in pieces, five completions of one request: the same texts as with room."""
    params = [held(seed, json=PERSON, n=1, **TIGHT) for seed in range(4)]
    prompts = ["x" * (10 * (i + 3)) for i in range(4)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    preempted, preempt = [], Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, r: (preempted.append(r.request_id), preempt(self, r)))
    small = LLM(
        str(tiny_llama), dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=24,
        block_size=16, num_gpu_blocks_override=17, enable_prefix_caching=True,
    )  # fmt: skip
    for _ in range(2):  # the second time prefixes are in the cache
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert preempted
    many = small.generate(["hi"], held(11, choice=["one", "two", "three"], n=5), use_tqdm=False)[0].outputs
    assert len(many) == 5
    assert {c.text for c in many} <= {"one", "two", "three"}
    small.llm_engine.scheduler.check_integrity()
    small.shutdown()


def test_a_dead_end_is_its_requests_alone(llm: Any) -> None:
    """Parameters that leave nothing of what the grammar allows end that request, with the words."""
    b = int(byte_tokenizer()("b", add_special_tokens=False).input_ids[0])
    dead = held(regex="ab", logit_bias={b: -float("inf")}, allowed_token_ids=[EOS, *range(b)])
    longer = held(regex="ab?", min_tokens=9)
    good = held(choice=["fine"])
    for ended, words in zip(run(llm, dead, good, longer), ("allowed_token_ids", None, "min_tokens=9"), strict=True):
        if words is None:
            assert (ended.text, ended.finish_reason) == ("fine", "stop")
        else:
            assert ended.finish_reason == "error"
            assert "structured_outputs: regex allows only 1 token" in ended.stop_reason
            assert words in ended.stop_reason


def test_a_limit_reached_in_service_ends_the_request(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Grammars._make_matcher

    def with_tight_limits(self: Grammars, grammar: str) -> Any:
        import llguidance

        make(self, grammar)
        limits = llguidance.LLParserLimits(step_max_items=3)
        return llguidance.LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)

    monkeypatch.setattr(Grammars, "_make_matcher", with_tight_limits)
    grammars = Grammars(byte_tokenizer)
    monkeypatch.setattr(llm.llm_engine.scheduler, "grammars", grammars)
    bad, good = run(llm, held(grammar='start: ("a" | "a" start | start "b" start)~1 "c"'), SamplingParams(max_tokens=3))
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert bad.stop_reason.startswith(("structured_outputs: grammar", "no token can be drawn"))
    assert "too" in bad.stop_reason or "limit" in bad.stop_reason, bad.stop_reason


def test_ends(llm: Any) -> None:
    """The end token only where the grammar may end, and min_tokens beside it; a grammar that is over ends what has no
    end token; stop strings and stop tokens in the text end it as ever."""
    eager = {"logit_bias": {EOS: 100.0}}
    assert [c.text for c in run(llm, held(regex="abc+", **eager), held(regex="abc+", min_tokens=7, **eager))] == [
        "abc",
        "abccccc",
    ]
    endless = held(regex="a{5}", ignore_eos=True)
    (completion,) = run(llm, endless)
    assert (completion.text, len(completion.token_ids), completion.finish_reason) == ("aaaaa", 5, "stop")
    (completion,) = run(llm, held(regex="a+", ignore_eos=True, max_tokens=9))
    assert (completion.text, completion.finish_reason) == ("a" * 9, "length")
    (completion,) = run(llm, held(regex="a{3}xyz", stop=["x"]))
    assert (completion.text, completion.stop_reason) == ("aaa", "x")
    a = int(byte_tokenizer()("a", add_special_tokens=False).input_ids[0])
    (completion,) = run(llm, held(regex="ba?c", stop_token_ids=[a], logit_bias={a: 100.0}))
    assert (completion.text, completion.stop_reason) == ("b", a)


def test_delta_outputs(llm: Any) -> None:
    from vllm.sampling_params import RequestOutputKind

    params = held(regex=REGEX, output_kind=RequestOutputKind.DELTA)
    whole = run(llm, held(regex=REGEX))[0].text
    llm.llm_engine.add_request("delta", "hello", params)
    text = ""
    while llm.llm_engine.has_unfinished_requests():
        text += "".join(output.outputs[0].text for output in llm.llm_engine.step())
    assert text == whole


def test_nan_logits_end_the_request_as_ever(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm.llm_engine.worker.model_runner.model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: torch.full_like(compute(hidden), torch.nan))
    (completion,) = run(llm, held(regex="ab"))
    assert (completion.finish_reason, completion.stop_reason) == ("error", "the model's logits are not finite")


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": r"(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "not an object"),
        ({"json": {"type": "foo"}}, "Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "http://127.0.0.1:9/x"}}, "http://127.0.0.1:9/x"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "passwd"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": {"const": float("nan")}}, "JSON"),
        ({"json": {"const": {1, 2}}}, "JSON"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= ("}, "EBNF"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, str(MAX_GRAMMAR_BYTES)),
    ],
)
def test_refused_before_it_runs(llm: Any, structured: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        run(llm, held(**structured))
    with pytest.raises(ValueError, match=re.escape(words)):  # in the front end already, which may be another process
        llm.llm_engine.input_processor.process_inputs("hello", held(**structured))
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "json": {}}, "json and regex"),
        ({"choice": []}, "choice=[]"),
        ({"choice": ["a", 3]}, "choice=['a', 3]"),
        ({"choice": "abc"}, "choice='abc'"),
        ({"json": 3}, "json=3"),
        ({"grammar": ""}, "grammar=''"),
        ({"json_object": False}, "nothing"),
        ({"regex": "\ud800"}, "regex"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "one of them"),
    ],
)
def test_parameters(structured: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        StructuredOutputsParams(**structured)


def test_parameters_as_a_dict_and_unknown_ones() -> None:
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs={}).structured_outputs is None
    with pytest.raises(ValueError, match=r"no 'regexp'.*regex"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(ValueError, match="a str"):
        SamplingParams(structured_outputs="a")
    with pytest.raises(NotImplementedError, match="structural_tag"):
        StructuredOutputsParams(structural_tag="{}")


def test_over_the_wire() -> None:
    given = held(3, json=PERSON, disable_any_whitespace=True, thinking_ends=7)
    given.structured_outputs = as_text(given.structured_outputs)  # type: ignore[arg-type]
    data = msgspec.msgpack.encode(Add("r", [1], params_on_the_wire(given)))
    there = params_from_the_wire(msgspec.msgpack.decode(data, type=Add).params)
    assert there.structured_outputs == given.structured_outputs
    assert json.loads(there.structured_outputs.json) == PERSON  # type: ignore[arg-type,union-attr]


def test_without_a_tokenizer(tiny_llama: Path) -> None:
    bare = LLM(str(tiny_llama), dtype="float32", max_model_len=64, skip_tokenizer_init=True, num_gpu_blocks_override=20)
    with pytest.raises(ValueError, match="skip_tokenizer_init=True; make the engine without it"):
        bare.generate([{"prompt_token_ids": [1]}], held(regex="a"), use_tqdm=False)
    bare.shutdown()


def matcher_of(tokenizer: Any, ends: tuple[int, ...] = (), **structured: Any) -> Any:
    params = held(stop_token_ids=list(ends), **structured)
    return Grammars(lambda: tokenizer).matcher(Request("r", [1], params, tokenizer.eos_token_id))


def allowed(matcher: Any, vocab_size: int) -> list[int]:
    words = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    matcher.fill(words)
    return [t for t in range(vocab_size) if words[t // 32] >> (t % 32) & 1]


@pytest.mark.parametrize("vocab_size", [100, 260, 320, 400])
def test_bits_of_any_vocabulary_size(vocab_size: int) -> None:
    """A model's vocabulary may be smaller or larger than its tokenizer's; nothing beyond the tokenizer's is allowed."""
    found = allowed(matcher_of(byte_tokenizer(), regex="[a-c]?"), vocab_size)
    expected = [*byte_tokenizer()("abc", add_special_tokens=False).input_ids, EOS]
    assert found == sorted(t for t in expected if t < vocab_size)
    everything = allowed(matcher_of(byte_tokenizer(), regex="(?s:.)*"), vocab_size)
    assert set(everything) <= {*range(256), EOS}


def test_a_token_outside_is_an_internal_error() -> None:
    matcher = matcher_of(byte_tokenizer(), regex="a")
    a = allowed(matcher, 260)
    with pytest.raises(AssertionError, match=rf"token 7 was sampled .* regex .* allows 1 tokens \(\[{a[0]}\]\)"):
        matcher.take(7, False)


def test_masked_logits_beside_a_loop(nan_poison: None) -> None:
    torch.manual_seed(0)
    logits, V = torch.randn(70, 75, dtype=torch.bfloat16), 75
    words = torch.randint(-(2**31), 2**31 - 1, (66, 3)).to(torch.int32)
    rows = torch.randperm(70)[:66]  # more than are taken at once
    place = {row: i for i, row in enumerate(rows.tolist())}
    found = process_logits(logits, SamplingMetadata(grammar=AllowedTokens(rows, words)))
    for row in range(70):
        for token in range(V):
            forbidden = row in place and not int(words[place[row], token // 32]) >> (token % 32) & 1
            assert found[row, token] == (-torch.inf if forbidden else logits[row, token].float())


def test_the_grammar_begins_after_thinking(llm: Any) -> None:
    """``<|user|>`` opens and ``<|assistant|>`` closes the thoughts of this test's model."""
    marks = {"thinking_starts": USER, "thinking_ends": ASSISTANT}
    think, stop = {"logit_bias": {USER: 100.0}}, {"skip_special_tokens": False}
    (direct,) = run(llm, held(choice=["ok"], logit_bias={USER: -100.0}, **marks))
    assert direct.text == "ok"
    (thought,) = run(llm, held(choice=["ok"], max_tokens=300, **marks, **think, **stop))
    # That bias opens again and again, which is text like other text; it ends at the limit, never with the end token.
    assert thought.finish_reason == "length"
    assert set(thought.token_ids) == {USER}
    closing = {"logit_bias": {ASSISTANT: 30.0}, **stop}
    (opened,) = run(llm, held(choice=["ok"], thinking_ends=ASSISTANT, **closing))
    assert re.fullmatch(r"(?s).*<\|assistant\|>ok", opened.text)
    assert opened.token_ids.count(ASSISTANT) == 1


def structured_rank(folder: str, tp: int, dp: int, loads: dict[int, list[int]]) -> list[tuple[str, str]]:
    """On a rank: prompts held to a regex, a schema and nothing, other ones on each DP rank."""
    import rank_checks

    llm = LLM(
        folder, tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=True, dtype="float32",
        distributed_executor_backend="external_launcher", max_model_len=200, max_num_seqs=8,
        max_num_batched_tokens=64, num_gpu_blocks_override=100,
    )  # fmt: skip
    kinds = [held(1, regex="[a-f]{3,20}[0-9]"), held(2, json=ASCII, **TIGHT), held(3, choice=["left", "right"])]
    kinds += [SamplingParams(max_tokens=12, seed=4), held(5, regex="ab", min_tokens=9)]
    own = loads[rank_checks.own_rank() // tp]
    outputs = llm.generate(["go on"] * len(own), [kinds[i] for i in own], use_tqdm=False)
    llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()
    return [(o.outputs[0].text, str(o.outputs[0].finish_reason)) for o in outputs]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("tp", "dp"), [(2, 2)])
def test_over_ranks(tmp_path: Path, tp: int, dp: int) -> None:
    """Random tokens inside the grammar, and a request that dies of it, on every TP rank alike, whatever the other DP
    rank has."""
    import launcher
    import tiny_models as tiny
    from engine_fakes import char_tokenizer

    folder = str(shutil.copytree(tiny.checkpoint("qwen3-moe"), tmp_path / "model"))
    char_tokenizer().save_pretrained(folder)
    loads = {0: [0, 1, 2, 3, 4, 0], 1: [1]}
    found = launcher.run_ranks(structured_rank, tp * dp, folder, tp, dp, loads, poison=True, deadline_s=180)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for kind, (text, reason) in [*zip(loads[0], found[0], strict=True), *zip(loads[1], found[2], strict=True)]:
        assert reason == {3: reason, 4: "error"}.get(kind, "stop")
        assert kind != 0 or re.fullmatch("[a-f]{3,20}[0-9]", text)
        assert kind != 1 or fits(ASCII, json.loads(text))
        assert kind != 2 or text in ("left", "right")


def first_tokens(tokenizer: Any, names: list[str], **structured: Any) -> set[str]:
    return {names[t] for t in allowed(matcher_of(tokenizer, **structured), len(names)) if t < len(names)}


def test_sentencepiece_of_a_gguf_file(tmp_path: Path) -> None:
    from test_gguf_tokenizers import VOCABULARY, sentencepiece

    tokenizer = sentencepiece(tmp_path / "m.gguf")
    free = {"h", "hi", "hello", "<0x68>", "b", "<0x62>"}
    assert first_tokens(tokenizer, VOCABULARY, regex="hi|hello|b") == free
    # A text that must follow is written as the tokenizer does.
    assert first_tokens(tokenizer, VOCABULARY, choice=[" hi"]) == {"▁hi"}
    assert first_tokens(tokenizer, VOCABULARY, choice=["é"]) == {"<0xC3>"}
    assert first_tokens(tokenizer, VOCABULARY, regex="h?") == {"h", "<0x68>", "</s>"}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_byte_level_of_a_gguf_file(tmp_path: Path, pre: str) -> None:
    """The tokenizer's own way to write a text is allowed, token by token, and then the end."""
    from test_gguf_tokenizers import CORPUS, converted, trained

    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(converted(tmp_path / "m.gguf", trained(pre), pre))
    for text in CORPUS[:3]:
        matcher = matcher_of(tokenizer, choice=[text, "no"])
        for token in tokenizer(text, add_special_tokens=False).input_ids:
            assert token in allowed(matcher, len(tokenizer))
            assert matcher.take(token, False)
        assert allowed(matcher, len(tokenizer)) == [tokenizer.eos_token_id]


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        eos_token_id = 0

    with pytest.raises(ValueError, match=r"fast tokenizer.*tokenizer_mode='slow'"):
        Grammars(Slow).check(StructuredOutputsParams(regex="a"))
