# SPDX-License-Identifier: Apache-2.0
"""What a client gets, output by output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import EngineCoreOutput, LogprobsLists

EOS = 9
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


def tokenizer() -> SimpleNamespace:
    """A token a letter; 9 is the end token."""
    return SimpleNamespace(decode=lambda ids, **_: "".join("abcdefghi$"[i] for i in ids))


def processor_of(params: SamplingParams, request_id: str = "r") -> OutputProcessor:
    processor = OutputProcessor(tokenizer())
    processor.add_request(request_id, "hi", [7, 8], params)
    return processor


def step(processor: OutputProcessor, token: int, request_id: str = "r", **kwargs) -> tuple[RequestOutput | None, list]:
    made, aborted = processor.process_outputs([EngineCoreOutput(request_id, [token], num_cached_tokens=1, **kwargs)])
    assert len(made) <= 1
    return (made[0] if made else None), aborted


def feed(processor: OutputProcessor, tokens: list[int], finish: str = "length", request_id: str = "r"):
    """All outputs until the last token, which finishes for the reason given."""
    outputs = []
    for i, token in enumerate(tokens):
        made, _ = step(processor, token, request_id, finish_reason=finish if i == len(tokens) - 1 else None)
        outputs.append(made)
    return outputs


def test_cumulative():
    processor = processor_of(SamplingParams())
    outputs = feed(processor, [0, 1, 2])
    assert [o.outputs[0].text for o in outputs] == ["a", "ab", "abc"]
    assert [o.outputs[0].token_ids for o in outputs] == [[0], [0, 1], [0, 1, 2]]
    assert [o.finished for o in outputs] == [False, False, True]
    assert [o.outputs[0].finish_reason for o in outputs] == [None, None, "length"]
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.prompt_token_ids, last.num_cached_tokens) == ("r", "hi", [7, 8], 1)
    assert last.prompt_logprobs is last.outputs[0].logprobs is last.outputs[0].cumulative_logprob is None
    assert last.outputs[0].finished()
    assert processor.get_num_unfinished_requests() == 0


def test_delta_adds_up():
    outputs = feed(processor_of(SamplingParams(output_kind=DELTA)), [0, 1, 2])
    assert [o.outputs[0].text for o in outputs] == ["a", "b", "c"]
    assert [o.outputs[0].token_ids for o in outputs] == [[0], [1], [2]]


def test_final_only():
    outputs = feed(processor_of(SamplingParams(output_kind=FINAL_ONLY)), [0, 1, 2])
    assert outputs[:2] == [None, None]
    assert (outputs[2].outputs[0].text, outputs[2].outputs[0].token_ids) == ("abc", [0, 1, 2])


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab$")])
def test_the_end_token_is_no_text(kind, include, text):
    params = SamplingParams(output_kind=kind, include_stop_str_in_output=include)
    outputs = [o for o in feed(processor_of(params), [0, 1, EOS], finish="stop") if o]
    pieces = [o.outputs[0].text for o in outputs]
    assert ("".join(pieces) if kind is DELTA else pieces[-1]) == text
    assert outputs[-1].outputs[0].token_ids[-1] == EOS
    assert outputs[-1].outputs[0].finish_reason == "stop"


def test_the_last_token_is_text_when_the_length_ends_it():
    assert feed(processor_of(SamplingParams()), [0, EOS])[-1].outputs[0].text == "a$"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_stop_string(kind):
    """Ends the request here, tells the scheduler, and never shows what belongs to it."""
    processor = processor_of(SamplingParams(stop="bcd", output_kind=kind))
    pieces, aborted = [], []
    for token in (0, 1, 2, 0, 1, 2, 3):
        made, aborted = step(processor, token)
        if made:
            pieces.append(made.outputs[0].text)
    assert aborted == ["r"]
    assert (
        pieces
        == {
            DELTA: ["a", "", "", "bca", "", "", ""],
            CUMULATIVE: ["a", "a", "a", "abca", "abca", "abca", "abca"],
            FINAL_ONLY: ["abca"],
        }[kind]
    )
    assert made.finished
    assert (made.outputs[0].finish_reason, made.outputs[0].stop_reason) == ("stop", "bcd")
    assert step(processor, 4) == (None, []), "what the scheduler ran too many"


def test_stop_string_in_the_very_last_token():
    """The scheduler has finished it already."""
    processor = processor_of(SamplingParams(stop="b"))
    step(processor, 0)
    made, aborted = step(processor, 1, finish_reason="length")
    assert aborted == []
    assert (made.outputs[0].finish_reason, made.outputs[0].stop_reason, made.outputs[0].text) == ("stop", "b", "a")


def test_held_text_comes_at_the_end():
    outputs = feed(processor_of(SamplingParams(stop="bcd", output_kind=DELTA)), [0, 1, 2])
    assert [o.outputs[0].text for o in outputs] == ["a", "", "bc"]


def test_stop_token_keeps_its_reason():
    made, _ = step(processor_of(SamplingParams(stop_token_ids=[4])), 4, finish_reason="stop", stop_reason=4)
    assert (made.outputs[0].text, made.outputs[0].stop_reason) == ("", 4)


def test_without_text():
    for params, tok in ((SamplingParams(detokenize=False), tokenizer()), (SamplingParams(), None)):
        processor = OutputProcessor(tok)
        processor.add_request("r", None, [7, 8], params)
        made = feed(processor, [0, 1])[-1]
        assert (made.outputs[0].text, made.outputs[0].token_ids) == ("", [0, 1])


# --- several completions ----------------------------------------------------------------------------------------------


def test_children_have_their_own_seeds():
    params = SamplingParams(n=3, seed=40, prompt_logprobs=1)
    children = OutputProcessor(tokenizer()).add_request("r", "hi", [7], params)
    assert [name for name, _ in children] == ["0_r", "1_r", "2_r"]
    assert [(p.n, p.seed, p.prompt_logprobs) for _, p in children] == [(1, 40, 1), (1, 41, None), (1, 42, None)]
    assert (params.n, params.seed) == (3, 40)


def both(processor: OutputProcessor, tokens: dict[str, int], **kwargs):
    made, _ = processor.process_outputs([EngineCoreOutput(name, [token], **kwargs) for name, token in tokens.items()])
    return made


def test_n_completions_are_one_output():
    processor = processor_of(SamplingParams(n=2))
    (made,) = both(processor, {"1_r": 1, "0_r": 0})
    assert [(c.index, c.text) for c in made.outputs] == [(0, "a"), (1, "b")]
    (made,) = both(processor, {"0_r": 2}, finish_reason="length")
    assert [(c.text, c.finish_reason) for c in made.outputs] == [("ac", "length"), ("b", None)]
    assert not made.finished
    (made,) = both(processor, {"1_r": 2}, finish_reason="length")
    assert [(c.text, c.finish_reason) for c in made.outputs] == [("ac", "length"), ("bc", "length")]
    assert made.finished
    assert processor.get_num_unfinished_requests() == 0


def test_n_completions_final_only_and_delta():
    processor = processor_of(SamplingParams(n=2, output_kind=FINAL_ONLY))
    assert both(processor, {"0_r": 0}, finish_reason="length") == []
    (made,) = both(processor, {"1_r": 1}, finish_reason="length")
    assert [c.text for c in made.outputs] == ["a", "b"]

    processor = processor_of(SamplingParams(n=2, output_kind=DELTA))
    both(processor, {"0_r": 0, "1_r": 1})
    (made,) = both(processor, {"1_r": 2}, finish_reason="length")
    assert [(c.index, c.text) for c in made.outputs] == [(1, "c")]
    (made,) = both(processor, {"0_r": 2}, finish_reason="length")
    assert made.finished


# --- ids, aborts ------------------------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_and_harms_nothing():
    processor = processor_of(SamplingParams(n=2))
    for name in ("r", "0_r"):
        with pytest.raises(ValueError, match="in use"):
            processor.add_request(name, None, [1], SamplingParams())
    processor.add_request("1_x", None, [1], SamplingParams())
    with pytest.raises(ValueError, match="'1_x' is in use"):
        processor.add_request("x", None, [1], SamplingParams(n=2))
    assert processor.get_num_unfinished_requests() == 2
    assert both(processor, {"0_r": 0, "1_r": 0, "1_x": 0})


def test_abort():
    processor = processor_of(SamplingParams(n=3))
    processor.add_request("other", None, [1], SamplingParams())
    both(processor, {"1_r": 0}, finish_reason="length")
    assert processor.abort_requests(["r", "r", "unknown"]) == ["0_r", "2_r"]
    assert both(processor, {"0_r": 0}) == []
    assert processor.get_num_unfinished_requests() == 1
    processor.add_request("r", None, [1], SamplingParams())
    assert feed(processor, [1])[-1].finished


@given(
    steps=st.lists(st.sampled_from(["0_r", "1_r", "both"]), min_size=1, max_size=12),
    cuts=st.lists(st.booleans(), min_size=12, max_size=12),
    kind=st.sampled_from([DELTA, CUMULATIVE]),
)
def test_outputs_that_become_one(steps, cuts, kind):
    """However outputs that nobody took in time are put together, a client gets what it gets of each, and at the end."""

    def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(n=2, logprobs=0, prompt_logprobs=0, output_kind=kind)
        processor, counts = processor_of(params), dict.fromkeys(("0_r", "1_r"), 0)
        prompt = EngineCoreOutput("0_r", [], new_prompt_logprobs=rows(([8], [-1.0], 1)))
        assert processor.process_outputs([prompt]).request_outputs == []
        made = []
        for number, who in enumerate([*steps, "both"]):
            step = []
            for name in counts if who == "both" else [who]:
                counts[name] += 1
                token, end = (counts[name] + 2 * int(name[0])) % 8, "length" if number == len(steps) else None
                row = rows(([token], [-counts[name] / 8], 1))
                step.append(EngineCoreOutput(name, [token], num_cached_tokens=1, new_logprobs=row, finish_reason=end))
            made += processor.process_outputs(step).request_outputs
        return made

    (final,) = outputs(FINAL_ONLY)
    one, *rest = outputs(kind)
    taken = [one]
    for output, is_cut in zip(rest, cuts, strict=False):
        if is_cut:
            taken.append(output)
        else:
            taken[-1].add(output, kind is DELTA)
    assert [output.finished for output in taken] == [*[False] * (len(taken) - 1), True]
    if kind is CUMULATIVE:
        assert taken[-1] == final
        return
    for output in taken:
        assert [completion.index for completion in output.outputs] in ([0], [1], [0, 1])
    assert [output.prompt_logprobs for output in taken] == [final.prompt_logprobs, *[None] * (len(taken) - 1)]
    for index, expected in enumerate(final.outputs):
        parts = [completion for output in taken for completion in output.outputs if completion.index == index]
        assert "".join(part.text for part in parts) == expected.text
        assert [token for part in parts for token in part.token_ids] == expected.token_ids
        assert [row for part in parts for row in part.logprobs] == expected.logprobs
        assert parts[-1].cumulative_logprob == expected.cumulative_logprob
        assert [part.finish_reason for part in parts] == [*[None] * (len(parts) - 1), "length"]


def test_outputs_given_earlier_do_not_change():
    outputs = feed(processor_of(SamplingParams(logprobs=0)), [0, 1, 2])
    assert outputs[0].outputs[0].token_ids == [0]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def rows(*each: tuple[list[int], list[float], int]) -> LogprobsLists:
    ids, logprobs, ranks = zip(*each, strict=True)
    return LogprobsLists(list(ids), list(logprobs), list(ranks))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_logprobs(kind):
    """Two likeliest tokens asked for where the batch had three; the chosen one among them, and not."""
    processor = processor_of(SamplingParams(logprobs=2, output_kind=kind))
    first = rows(([1, 1, 2, 3], [-0.5, -0.5, -1.5, -2.0], 1))
    second = rows(([4, 1, 2, 3], [-3.0, -0.25, -1.0, -2.0], 7))
    one, _ = step(processor, 1, new_logprobs=first)
    two, _ = step(processor, 4, new_logprobs=second, finish_reason="length")
    expected = [
        {1: Logprob(-0.5, 1, "b"), 2: Logprob(-1.5, 2, "c")},
        {4: Logprob(-3.0, 7, "e"), 1: Logprob(-0.25, 1, "b"), 2: Logprob(-1.0, 2, "c")},
    ]
    assert two.outputs[0].logprobs == (expected[1:] if kind is DELTA else expected)
    assert two.outputs[0].cumulative_logprob == -3.5
    if kind is not FINAL_ONLY:
        assert one.outputs[0].logprobs == expected[:1]
        assert one.outputs[0].cumulative_logprob == -0.5


def test_the_whole_vocabulary():
    processor = processor_of(SamplingParams(logprobs=-1))
    made, _ = step(processor, 2, new_logprobs=rows(([2, 0, 1, 2], [-3.0, -1.0, -2.0, -3.0], 3)))
    assert made.outputs[0].logprobs == [{2: Logprob(-3.0, 3, "c"), 0: Logprob(-1.0, 1, "a"), 1: Logprob(-2.0, 2, "b")}]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_come_in_chunks(kind):
    processor = OutputProcessor(tokenizer())
    processor.add_request("r", None, [5, 6, 7], SamplingParams(prompt_logprobs=0, output_kind=kind))
    chunk = EngineCoreOutput("r", [], new_prompt_logprobs=rows(([6, 1], [-1.0, -0.1], 4)))
    assert processor.process_outputs([chunk]).request_outputs == []
    last = rows(([7, 7], [-2.0, -2.0], 1))
    (one,) = processor.process_outputs([EngineCoreOutput("r", [0], new_prompt_logprobs=last)]).request_outputs or [None]
    two, _ = step(processor, 1, finish_reason="length")
    expected = [None, {6: Logprob(-1.0, 4, "g")}, {7: Logprob(-2.0, 1, "h")}]
    if kind is DELTA:
        assert (one.prompt_logprobs, two.prompt_logprobs) == (expected, None)
    else:
        assert two.prompt_logprobs == expected


def test_no_token_text_without_detokenisation():
    processor = processor_of(SamplingParams(logprobs=0, detokenize=False))
    made, _ = step(processor, 2, new_logprobs=rows(([2], [-1.0], 1)))
    assert made.outputs[0].logprobs == [{2: Logprob(-1.0, 1, None)}]
