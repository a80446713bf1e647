# SPDX-License-Identifier: Apache-2.0
"""The methods of ``AsyncLLM`` over an ``LLMEngine`` that steps in a thread of this process: for tests of what is in
front of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from vllm import LLMEngine, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.messages import Add, params_on_the_wire
from vllm.v1.metrics.stats import rank_stats


class InlineEngine:
    """One DP rank. ``aborted``: the ids that were aborted before their end, in order.

    ``held()`` stops steps, ``stopping_after(n)`` all but the next ``n``; ``die(reason)`` ends the engine as the loss of
    a rank does, ``call(f)`` is ``f(engine)`` between two steps.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self._engine = LLMEngine.from_engine_args(EngineArgs(model, **engine_args))
        self.vllm_config = self._engine.vllm_config
        self.model_config = self._engine.model_config
        self.tokenizer = self._engine.tokenizer
        self.generation_config = self._engine.generation_config
        self.metrics = self._engine.output_processor.metrics
        self.rank_waits: dict[int, list[int]] = {}
        self.aborted: list[str] = []
        self.dead_error: EngineDeadError | None = None
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Any]]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_holds = 0
        self._steps_left: int | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="inline-engine", daemon=True)
        self._thread.start()

    async def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        data_parallel_rank: int | None = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        if priority or any(value is not None for value in kwargs.values()):
            raise NotImplementedError(f"priority={priority}, {kwargs} are not supported; leave them out")
        if data_parallel_rank not in (None, 0):
            raise ValueError(f"data_parallel_rank={data_parallel_rank}: there are 1 DP ranks; give 0 or leave it out")
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if self.dead_error is not None:
            raise self.dead_error
        if request_id in self._queues:
            raise ValueError(f"request_id={request_id!r} is in use")
        self._queues[request_id] = (asyncio.get_running_loop(), queue)
        self._post(lambda: self._add(request_id, prompt, sampling_params))
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = isinstance(output, Exception) or output.finished
                if isinstance(output, Exception):
                    raise output
                yield output
        finally:
            self._queues.pop(request_id, None)
            if not finished:
                await self.abort(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._post(lambda: self._engine.abort_request(ids))
        self.aborted += ids  # whoever sees them here comes after the abort

    async def encode(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("encode is not supported: only text generation is")

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self.errored

    async def check_health(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    @property
    def rank_stats(self) -> list[dict[str, float]]:
        return [rank_stats(self._engine)]

    def stats(self) -> list[dict[str, float]]:
        return self.rank_stats

    def shutdown(self, timeout: float | None = None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        self._engine.shutdown()

    # -- for tests

    def call(self, function: Callable[[LLMEngine], Any]) -> Any:
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(function(self._engine))
            except BaseException as error:
                result.set_exception(error)

        self._post(run)
        return result.result(timeout=120)

    def check_idle(self) -> None:
        """No request is left, and no block in use."""
        assert self.call(lambda engine: engine.get_num_unfinished_requests()) == 0
        self.call(lambda engine: engine.scheduler.check_integrity())
        assert not self._queues

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._changed:
            self._num_holds += 1
        self.call(lambda _: None)  # the running step ends
        try:
            yield
        finally:
            with self._changed:
                self._num_holds -= 1
                self._changed.notify()

    @contextlib.contextmanager
    def stopping_after(self, steps: int) -> Iterator[None]:
        """However late the test is, no request of more steps ends in here."""
        self.call(lambda _: setattr(self, "_steps_left", steps))
        try:
            yield
        finally:
            self.call(lambda _: setattr(self, "_steps_left", None))

    def die(self, reason: str) -> None:
        self._post(lambda: self._fail(EngineDeadError(reason)))

    # -- the engine's thread

    def _post(self, function: Callable[[], None]) -> None:
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def _give(self, request_id: str, output: Any) -> None:
        if request_id in self._queues:
            loop, queue = self._queues[request_id]
            with contextlib.suppress(RuntimeError):  # a loop that has ended
                loop.call_soon_threadsafe(queue.put_nowait, output)

    def _add(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if request_id not in self._queues:
            return
        if self.dead_error is not None:
            self._give(request_id, self.dead_error)
            return
        try:
            # What is given can also travel to a rank of another process.
            checked = self._engine.input_processor.process_inputs(prompt, params)
            msgspec.msgpack.encode(Add(request_id, checked.prompt_token_ids, params_on_the_wire(checked.params)))
            self._engine.add_request(request_id, prompt, params)
        except Exception as error:
            self._give(request_id, error)

    def _fail(self, error: EngineDeadError) -> None:
        self.dead_error = error
        for request_id in list(self._queues):
            self._give(request_id, error)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._calls or self._stopping or self._due()):
                    self._changed.wait()
                if self._stopping:
                    return
                calls = list(self._calls)
                self._calls.clear()
            for call in calls:
                call()
            if self._due():
                if self._steps_left is not None:
                    self._steps_left -= 1
                try:
                    outputs = self._engine.step()
                except Exception as error:
                    self._fail(EngineDeadError(f"a step failed: {error!r}"))
                    continue
                for output in outputs:
                    self._give(output.request_id, output)

    def _due(self) -> bool:
        stopped = self._num_holds or self._steps_left == 0 or self.errored
        return not stopped and self._engine.has_unfinished_requests()
