# SPDX-License-Identifier: Apache-2.0
"""LLM and LLMEngine over a worker that samples last token + 1, so that every expected output is known by hand."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fakes import FakeWorker

from vllm import LLM, LLMEngine, SamplingParams, TextPrompt, TokensPrompt
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints import llm as llm_module
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def llm(tiny_llama: Path, fake_worker: type[FakeWorker], ahead: bool) -> LLM:
    return LLM(str(tiny_llama), max_num_seqs=4, max_num_batched_tokens=8, async_scheduling=ahead)


@pytest.fixture
def engine(tiny_llama: Path, fake_worker: type[FakeWorker], ahead: bool) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(str(tiny_llama), max_num_seqs=4, async_scheduling=ahead))


def token_ids(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def idle(engine: LLMEngine) -> bool:
    """Nothing queued anywhere, no block in use; a step in flight has only rows that nobody wants any more."""
    if engine.engine_core._in_flight is not None:
        assert engine.step() == []
    engine.scheduler.check_integrity()
    return not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([5, 6], [[7, 8, 9, 10]]),
        ([[5, 6]], [[7, 8, 9, 10]]),
        (TokensPrompt(prompt_token_ids=[5]), [[6, 7, 8, 9]]),
        ({"prompt_token_ids": [5], "prompt": "five"}, [[6, 7, 8, 9]]),
        ([TokensPrompt(prompt_token_ids=[9]), [1]], [[10, 11, 12, 13], [2, 3, 4, 5]]),
        ([[1], {"prompt_token_ids": [3]}], [[2, 3, 4, 5], [4, 5, 6, 7]]),
        ([], []),
    ],
)
def test_forms_of_token_prompts(llm: LLM, prompts, expected):
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert token_ids(outputs) == expected
    assert idle(llm.llm_engine)


def test_forms_of_text_prompts(llm: LLM):
    tokenizer = llm.get_tokenizer()
    assert tokenizer("ab").input_ids == [256, *tokenizer.convert_tokens_to_ids(["a", "b"])]
    for prompts in ("ab", ["ab"], TextPrompt(prompt="ab"), [{"prompt": "ab"}]):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.prompt == "ab"
        assert output.prompt_token_ids == tokenizer("ab").input_ids
        assert output.outputs[0].text == "cdef"
    (output,) = llm.generate("ab", GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert output.prompt_token_ids == tokenizer("ab").input_ids[1:]


def test_results_come_in_the_order_of_the_prompts(llm: LLM):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 2, 7, 3)]
    outputs = llm.generate([[10 * i] for i in range(6)], params, use_tqdm=False)
    assert token_ids(outputs) == [[10 * i + k for k in range(1, p.max_tokens + 1)] for i, p in enumerate(params)]
    assert [output.request_id for output in outputs] == sorted((o.request_id for o in outputs), key=int)
    assert all(output.finished for output in outputs)


def test_callers_params_are_left_alone(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=None)
    llm.generate([[250], [251]], params, use_tqdm=False)
    assert params.max_tokens is None
    assert params.output_kind == RequestOutputKind.CUMULATIVE
    assert params.stop_token_ids == []


def test_several_completions_of_one_prompt(llm: LLM):
    (output,) = llm.generate([[5]], SamplingParams(n=3, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [(c.index, list(c.token_ids)) for c in output.outputs] == [(0, [6, 7]), (1, [6, 7]), (2, [6, 7])]
    assert idle(llm.llm_engine)


def test_max_tokens_defaults_to_what_the_model_length_leaves(llm: LLM):
    (output,) = llm.generate([[0] * 500], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate([[0] * 500], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12


def test_truncate_prompt_tokens(llm: LLM):
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, truncate_prompt_tokens=2), use_tqdm=False)
    assert output.prompt_token_ids == [2, 3]
    params = SamplingParams(max_tokens=10, truncate_prompt_tokens=-1)
    (output,) = llm.generate([[7] * 1000], params, use_tqdm=False)
    assert len(output.prompt_token_ids) == 502


def test_end_tokens(tiny_llama: Path, fake_worker: type[FakeWorker]):
    overrides = {"eos_token_id": [257, 12]}
    llm = LLM(str(tiny_llama), override_generation_config=overrides)
    (output,) = llm.generate([[9]], SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
    assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason) == ([10, 11, 12], "stop")
    assert output.outputs[0].stop_reason == 12
    (output,) = llm.generate([[9]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_default_sampling_params(tiny_llama: Path, fake_worker: type[FakeWorker]):
    overrides = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}
    llm = LLM(str(tiny_llama), override_generation_config=overrides)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 3)
    assert len(llm.generate([[1]], use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_chat(llm: LLM):
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "<|user|>hi<|assistant|>"
    assert output.prompt_token_ids[0] == 258, "the template's special token, and no <s> in front of it"
    assert output.prompt_token_ids[-1] == 259
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    outputs = llm.chat([conversation, parts], GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["<|user|>hi<|assistant|>", "<|user|>a\nb<|assistant|>"]
    begun = [*conversation, {"role": "assistant", "content": "yes, "}]
    (output,) = llm.chat(begun, GREEDY, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<|user|>hi<|assistant|>yes, "
    template = "{{ mood }}{{ messages[0].content }}"
    (output,) = llm.chat(conversation, GREEDY, False, chat_template=template, chat_template_kwargs={"mood": "!"})
    assert output.prompt == "!hi"


def test_chat_template_file(tiny_llama: Path, fake_worker: type[FakeWorker], tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[-1].content }}")
    llm = LLM(str(tiny_llama), chat_template=str(file))
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert output.prompt == "hi"
    with pytest.raises(ValueError, match="neither Jinja text nor a readable file"):
        load_chat_template("no/such/template.jinja")


@pytest.mark.parametrize(
    ("messages", "kwargs", "message"),
    [
        ([{"content": "hi"}], {}, "no chat message"),
        ([{"role": "user", "content": "hi"}], {"chat_template": "{{ raise_exception('no') }}"}, "cannot render"),
        ([{"role": "user", "content": "hi"}], {"continue_final_message": True}, "add_generation_prompt=False"),
    ],
)
def test_chat_that_cannot_be_rendered(llm: LLM, messages, kwargs, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False, **kwargs)
    assert idle(llm.llm_engine)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate([[1], [2]], GREEDY)
    assert "Processed prompts" in (text := capsys.readouterr().err)
    assert "2/2" in text
    assert "tok/s" in text
    made = []

    def make(**kwargs):
        from tqdm import tqdm

        made.append(tqdm(**kwargs, disable=True))
        return made[-1]

    llm.generate([[1], [2]], GREEDY, use_tqdm=make)
    assert made[0].total == 2


def test_engine_step_by_step(engine: LLMEngine):
    engine.add_request("a", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.add_request("b", [50, 51], SamplingParams(max_tokens=1, ignore_eos=True))
    assert engine.get_num_unfinished_requests() == 2
    seen = []
    while engine.has_unfinished_requests():
        seen += [(o.request_id, list(o.outputs[0].token_ids), o.finished) for o in engine.step()]
    assert seen == [("a", [6], False), ("b", [52], True), ("a", [6, 7], False), ("a", [6, 7, 8], True)]
    assert idle(engine)


def test_abort_lets_others_finish(engine: LLMEngine):
    for name in "abc":
        engine.add_request(name, [ord(name)], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.abort_request(["b", "not there"])
    engine.abort_request("b")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: len(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    assert finished == {"a": 5, "c": 5}
    assert idle(engine)


def test_abort_of_several_completions(engine: LLMEngine):
    engine.add_request("a", [1], SamplingParams(n=2, max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    assert idle(engine)


def test_stop_string_ends_the_request(engine: LLMEngine):
    engine.add_request("a", "a", SamplingParams(max_tokens=50, stop=["cd"], ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].finish_reason) == ("b", "stop")
    assert outputs[-1].outputs[0].stop_reason == "cd"
    assert idle(engine)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as at a terminal: a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_ends_the_call_after_the_step(llm: LLM, fake_worker: type[FakeWorker], monkeypatch):
    steps_ended = []

    def interrupt(worker: FakeWorker, output) -> None:
        if worker.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        steps_ended.append(worker.num_steps)

    monkeypatch.setattr(fake_worker, "before_step", staticmethod(interrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert steps_ended == [0, 1, 2], "the step that the signal came in was finished, and none ran after it"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert idle(llm.llm_engine)
    assert token_ids(llm.generate([[5]], GREEDY, use_tqdm=False)) == [[6, 7, 8, 9]]
    assert llm.llm_engine.worker.finished >= {"0", "1"}, "the worker was told of the requests that ended"


@pytest.mark.usefixtures("interruptible")
def test_interrupt_that_is_not_held_back_tears_the_step(llm: LLM, fake_worker: type[FakeWorker], monkeypatch):
    """The fault that holding the signal back cures: the worker never ends the step that the scheduler counts on."""
    ended = []

    def interrupt(worker: FakeWorker, output) -> None:
        if worker.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        ended.append(worker.num_steps)

    monkeypatch.setattr(fake_worker, "before_step", staticmethod(interrupt))
    monkeypatch.setattr(llm_module, "_interrupts_between_steps", lambda: contextlib.nullcontext(lambda: None))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert ended == [0, 1]


@pytest.mark.usefixtures("interruptible")
def test_second_interrupt_does_not_wait(llm: LLM, fake_worker: type[FakeWorker], monkeypatch):
    def stuck(worker: FakeWorker, output) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal did not end the step")

    monkeypatch.setattr(fake_worker, "before_step", staticmethod(stuck))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    assert idle(llm.llm_engine)


def test_worker_error_leaves_nothing_queued(llm: LLM, fake_worker: type[FakeWorker], monkeypatch):
    def fail(worker: FakeWorker, output) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(fake_worker, "before_step", staticmethod(fail))
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert idle(llm.llm_engine)


def test_idle_rank_steps_as_long_as_others_have_work(tiny_llama: Path, fake_worker: type[FakeWorker], monkeypatch):
    monkeypatch.setattr(fake_worker, "steps_of_other_ranks", 6)
    llm = LLM(str(tiny_llama), data_parallel_size=2, distributed_executor_backend="external_launcher")
    assert llm.llm_engine.vllm_config.parallel_config == ParallelConfig(1, 2, False, "external_launcher")
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.llm_engine.worker.num_steps == 7, "six with work elsewhere, and one in which all agree that none is left"
    assert token_ids(llm.generate([[5]], GREEDY, use_tqdm=False)) == [[6, 7, 8, 9]]


def test_prefix_cache_reset(llm: LLM):
    prompt = [list(range(40))]
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_stats_count_the_work(tiny_llama: Path, fake_worker: type[FakeWorker]):
    llm = LLM(str(tiny_llama), disable_log_stats=False)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    stats = llm.llm_engine.stats
    assert (stats.steps, stats.tokens, stats.context_tokens, stats.output_tokens) == (3, 5, 3 + 4 + 5, 3)


def test_skip_tokenizer_init(tiny_llama: Path, fake_worker: type[FakeWorker]):
    llm = LLM(str(tiny_llama), skip_tokenizer_init=True)
    (output,) = llm.generate([[5]], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [6, 7, 8, 9]
    for call in (llm.get_tokenizer, lambda: llm.generate("text", GREEDY, use_tqdm=False)):
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            call()


def test_from_engine_args(tiny_llama: Path, fake_worker: type[FakeWorker]):
    llm = LLM.from_engine_args(EngineArgs(str(tiny_llama), max_model_len=64))
    assert llm.llm_engine.model_config.max_model_len == 64
    llm.shutdown()
