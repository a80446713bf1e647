# SPDX-License-Identifier: Apache-2.0
"""From a request to the engine's outputs: what completions and chats share."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.chat_utils import load_chat_template, render_chat
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.entrypoints.openai.errors import APIError, as_api_error
from vllm.entrypoints.openai.protocol import ChatTemplateFields, Sampling
from vllm.inputs import TokensPrompt
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.config import sampling_defaults
from vllm.v1.engine.input_processor import EngineInput, InputProcessor

_T = TypeVar("_T")
_LOWEST_LOGPROB = -9999.0  # JSON has no -inf
_NUM_THREADS = 4
as_json = msgspec.json.Encoder().encode  # a tenth of json's time, for each token that is streamed


class Job(NamedTuple):
    """A request that was checked. ``request_id``: the client's, or made here; ``inputs``: one for each prompt."""

    request_id: str
    model: str
    created: int
    params: SamplingParams
    inputs: list[EngineInput]
    data_parallel_rank: int | None


class Serving:
    """The engine, and threads that tokenise and render templates, each with a tokenizer of its own: one tokenizer
    cannot be used by two threads at once."""

    def __init__(self, engine: EngineClient, args: FrontendArgs) -> None:
        self.engine, self.args = engine, args
        self.model_config = engine.model_config
        names = self.model_config.served_model_name or self.model_config.model
        self.model_names: list[str] = [names] if isinstance(names, str) else list(names)
        self.chat_template = load_chat_template(args.chat_template)
        self.defaults = sampling_defaults(engine.generation_config)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="vllm-prompts")
        self._of_thread = threading.local()
        self._copying = threading.Lock()
        self.tokenizer = copy.deepcopy(engine.tokenizer)  # the event loop's
        template_call = getattr(self.tokenizer, "apply_chat_template", lambda **kwargs: None)
        self._template_arguments = set(inspect.signature(template_call).parameters) - {"kwargs"}
        for _ in range(_NUM_THREADS):  # not with the first requests: a tokenizer takes a tenth of a second
            self._threads.submit(self.processor)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- in the threads -------------------------------------------------------------------------------------------

    def processor(self) -> InputProcessor:
        """This thread's."""
        if not hasattr(self._of_thread, "processor"):
            with self._copying:
                tokenizer = copy.deepcopy(self.engine.tokenizer)
            self._of_thread.processor = InputProcessor(
                self.engine.vllm_config, tokenizer, self.engine.generation_config
            )
        return self._of_thread.processor

    def thread_tokenizer(self) -> Any:
        tokenizer = self.processor().tokenizer
        if tokenizer is None:
            raise ValueError("this needs a tokenizer, and the server was started with --skip-tokenizer-init")
        return tokenizer

    async def in_thread(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """``function``'s result; what it cannot take is the client's fault."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))
        except (TypeError, OverflowError, RecursionError) as error:
            raise APIError(400, f"{type(error).__name__}: {error}") from error

    def render(self, request: ChatTemplateFields) -> TokensPrompt:
        """The prompt of a conversation; in a thread."""
        if request.chat_template is not None and not self.args.trust_request_chat_template:
            raise APIError(
                400,
                "chat_template: the server takes no templates of clients; --trust-request-chat-template allows them",
                "chat_template",
            )
        given = request.chat_template_kwargs or {}
        if taken := sorted(self._template_arguments & set(given)):
            raise APIError(
                400, f"chat_template_kwargs has {taken}, which are no variables of a template", "chat_template_kwargs"
            )
        variables = {**(self.args.default_chat_template_kwargs or {}), **given}
        if request.documents is not None:
            variables["documents"] = request.documents
        return render_chat(
            request.messages or [],
            self.thread_tokenizer(),
            self.model_config,
            chat_template=request.chat_template or self.chat_template,
            chat_template_content_format=self.args.chat_template_content_format,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            tools=request.tools or None,
            chat_template_kwargs=variables,
            tokenizer_kwargs={"add_special_tokens": bool(request.add_special_tokens)},
        )

    def check_prompts(
        self, prompts: Sequence[Any], params: SamplingParams, kwargs: dict[str, Any]
    ) -> list[EngineInput]:
        """Tokenised, and known to be such as the engine can run; in a thread."""
        processor = self.processor()
        return [processor.process_inputs(prompt, params, kwargs) for prompt in prompts]

    # --- requests -------------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The name that the answer has; the first where none is given."""
        if name and name not in self.model_names:
            raise APIError(404, f"the model {name[:200]!r} is not served here; give one of {self.model_names}", "model")
        return name or self.model_names[0]

    def request_id(self, raw: Request, request: Sampling) -> str:
        """The client's where it can be shown in a header, else a new one."""
        return raw.scope["vllm.request_id"] or clean_id(request.request_id) or uuid.uuid4().hex

    def make_job(
        self, kind: str, raw: Request, request: Sampling, params: SamplingParams, inputs: list[EngineInput]
    ) -> Job:
        if params.n > (most := self.args.max_sequences_per_request):
            raise APIError(400, f"n={params.n} exceeds the {most} completions of one request", "n")
        rank = request.data_parallel_rank
        if (header := raw.headers.get("x-data-parallel-rank")) is not None:
            if not re.fullmatch("[0-9]{1,6}", header):
                raise APIError(400, f"X-data-parallel-rank: {header[:100]!r} is no rank; give its number")
            rank = int(header)
        params.truncate_prompt_tokens = None  # the inputs are
        request_id = self.request_id(raw, request)
        raw.scope["vllm.request_id"] = request_id
        return Job(f"{kind}-{request_id}", self.check_model(request.model), int(time.time()), params, inputs, rank)

    def streams(self, job: Job) -> list[AsyncGenerator[RequestOutput, None]]:
        """The engine's outputs, one stream for each prompt; two clients may give the same id."""
        unique = uuid.uuid4().hex[:8]
        return [
            self.engine.generate(
                {"prompt": given.prompt, "prompt_token_ids": given.prompt_token_ids},
                job.params,
                f"{job.request_id}-{number}-{unique}",
                data_parallel_rank=job.data_parallel_rank,
            )
            for number, given in enumerate(job.inputs)
        ]

    async def final_outputs(self, job: Job) -> list[RequestOutput]:
        """The last output of each prompt; when one fails, the others end."""
        tasks = [asyncio.ensure_future(_last(stream)) for stream in self.streams(job)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
        for output in outputs:
            check_finish(output)
        return outputs

    def outputs(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the prompt, output) as they come."""
        streams = self.streams(job)
        return _numbered(streams[0]) if len(streams) == 1 else _merged(streams)

    def token_name(self, token_id: int, logprob: Logprob | None, request: Sampling) -> str:
        """How a token is written in log-probabilities."""
        as_id = request.return_tokens_as_token_ids
        if (self.args.return_tokens_as_token_ids if as_id is None else as_id) or self.tokenizer is None:
            return f"token_id:{token_id}"
        return (logprob and logprob.decoded_token) or self.tokenizer.decode([token_id])


async def _last(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    last = None
    async with contextlib.aclosing(stream):
        async for output in stream:
            last = output
    assert last is not None, "the engine's stream ended without an output"
    return last


async def _numbered(stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with contextlib.aclosing(stream):
        async for output in stream:
            check_finish(output)
            yield 0, output


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        end: Exception | None = None
        async with contextlib.aclosing(stream):
            try:
                async for output in stream:
                    await queue.put((number, output))
            except Exception as error:
                end = error
        await queue.put((number, end))

    tasks = [asyncio.ensure_future(pump(*one)) for one in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, output = await queue.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                left -= 1
            else:
                check_finish(output)
                yield number, output
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def check_finish(output: RequestOutput) -> None:
    """Raise where the engine ended a completion because something was wrong with it."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            reason = str(completion.stop_reason)
            status = 400 if reason.startswith("no token can be drawn") else 500
            raise APIError(status, f"the engine ended the request: {reason}")


def clean_id(text: str | None) -> str | None:
    """``text`` where it can be an id and a header."""
    return text if text and re.fullmatch(r"[!-~]{1,200}", text) else None


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def prompt_logprobs_json(rows: Any) -> list[dict[str, Any] | None] | None:
    """A list with an entry for each prompt token, by token id, as upstream gives it."""
    if rows is None:
        return None
    return [
        row
        and {
            str(i): {"logprob": finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for i, p in row.items()
        }
        for row in rows
    ]


class Usage:
    """Tokens of one request, counted as outputs come."""

    def __init__(self, job: Job) -> None:
        self.prompt = sum(len(given.prompt_token_ids) for given in job.inputs)
        self.completion = 0
        self._cached: dict[int, int] = {}

    def add(self, number: int, output: RequestOutput) -> None:
        self.completion += sum(len(completion.token_ids) for completion in output.outputs)
        if output.num_cached_tokens is not None:
            self._cached[number] = output.num_cached_tokens

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % as_json(payload)


async def with_errors(chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    """Events of ``chunks`` and the end; an error is an event too, the last before the end.

    The first chunk's error is raised: the answer has not begun, and can still say what it is.
    """
    begun = False
    try:
        async for chunk in chunks:
            yield event(chunk)
            begun = True
    except Exception as error:
        if not begun:
            raise
        yield event(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def choice_end(completion: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
