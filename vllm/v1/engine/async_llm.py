# SPDX-License-Identifier: Apache-2.0
"""An engine whose ranks are processes of their own, for many clients at once."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vllm import launchers
from vllm._upstream_names import refuse
from vllm.config import CompilationConfig, ModelConfig, VllmConfig
from vllm.distributed.parallel_state import check_world_size
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import tokenizer_of
from vllm.v1.engine.core_client import RankClient, silence_timeout
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.input_processor import EngineInput, InputProcessor
from vllm.v1.engine.launch import Launch
from vllm.v1.engine.messages import Add, params_on_the_wire
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.protocol import Effects
from vllm.v1.engine.ray_launch import check_installed
from vllm.v1.metrics.engine_metrics import EngineMetrics


class _Client:
    """Who waits for a request's outputs, on the event loop that asked for them.

    Outputs that come before the last one was taken become one with it: who is behind has less to do, not more.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self.loop = asyncio.get_running_loop()
        self._are_deltas = kind is RequestOutputKind.DELTA
        self._came = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._error = output
        elif self._output is None:
            self._output = output
        else:
            self._output.add(output, self._are_deltas)
        self._came.set()

    async def get(self) -> RequestOutput:
        """Raises the error that came, after the outputs before it."""
        await self._came.wait()
        output, self._output = self._output, None
        if output is None:
            assert self._error is not None, "woken without an output and without an error"
            raise self._error
        if self._error is None:
            self._came.clear()
        return output


class AsyncLLM:
    """Starts the ranks of an engine and hands requests to them; of any thread and event loop.

    Requests go to the DP rank with the fewest tokens waiting. ``rank_stats``: what each DP rank told last of itself;
    ``rank_waits``: rank → ranks that hold it up; ``metrics``: None with ``disable_log_stats``.
    """

    def __init__(self, vllm_config: VllmConfig, generation_config: Mapping[str, Any], launch: Launch) -> None:
        config = vllm_config.model_config
        self.generation_config = dict(generation_config)
        self.tokenizer = tokenizer_of(config)
        self.output_processor = OutputProcessor(self.tokenizer, log_stats=not vllm_config.disable_log_stats)
        self._clients: dict[str, _Client] = {}
        # One thread: the tokenizer is not made for several.
        self._tokenising = ThreadPoolExecutor(1, "vllm-tokenise")
        self.ranks = RankClient(launch, vllm_config.parallel_config.tensor_parallel_size, self._hand_out)
        atexit.register(self.shutdown, 0)
        try:
            self.ranks.start()
        except BaseException:
            self.shutdown(0)
            raise
        assert self.ranks.ready is not None, "the ranks are ready, and the first has not said so"
        longest = min(config.max_model_len, self.ranks.ready.max_model_len)
        self.model_config: ModelConfig = dataclasses.replace(config, max_model_len=longest)
        self.vllm_config = dataclasses.replace(vllm_config, model_config=self.model_config)
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer, generation_config)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        *,
        nnodes: int = 1,
        node_rank: int = 0,
        master_addr: str = "127.0.0.1",
        master_port: int = 29501,
        max_restarts: int = 0,
        by_torchrun: bool = False,
    ) -> AsyncLLM:
        """Returns when all ranks are ready; see ``Launch`` for the last arguments.

        Raises ``ValueError`` for arguments that cannot work, ``EngineDeadError`` where the ranks do not come up.
        """
        config = engine_args.create_engine_config()
        launch = make_launch(
            engine_args,
            config,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            max_restarts=max_restarts,
            by_torchrun=by_torchrun,
        )
        return cls(config, engine_args.get_generation_config(config.model_config), launch)

    async def get_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        return self.tokenizer

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request as they come, of the kind that ``sampling_params.output_kind`` says.

        Closing or cancelling it ends the request. Raises ``ValueError`` for a request that can never run, and
        ``EngineDeadError`` where the engine is lost, each before the first output or between two.
        """
        if lora_request is not None or trace_headers or priority:
            raise NotImplementedError("lora_request, trace_headers and priority are not supported; leave them out")
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} is a {type(request_id).__name__}; give a string")
        arrival_time = time.time()
        await self.check_health()
        arguments = (prompt, sampling_params, tokenization_kwargs)
        takes_long = getattr(sampling_params, "structured_outputs", None) is not None or isinstance(prompt, str)
        if takes_long or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt):
            loop = asyncio.get_running_loop()
            checked = await loop.run_in_executor(self._tokenising, self.input_processor.process_inputs, *arguments)
        else:
            checked = self.input_processor.process_inputs(*arguments)
        if checked.params.structured_outputs is not None:
            data_parallel_rank = await self._prepare(checked, data_parallel_rank)
        client = self._add(request_id, checked, arrival_time, data_parallel_rank)
        finished = False
        try:
            while not finished:
                output = await client.get()
                finished = output.finished
                yield output
        finally:
            with self.ranks.lock:
                if self._clients.get(request_id) is client:  # else it has ended, and the id may be another's
                    self._drop([request_id])

    async def _prepare(self, checked: EngineInput, dp_rank: int | None) -> int:
        """Have the ranks of a DP rank, which is returned, make the request's grammar before it can hold up a step."""
        num_tokens, grammar = len(checked.prompt_token_ids), params_on_the_wire(checked.params)["structured_outputs"]
        with self.ranks.lock:
            protocol = self.ranks.protocol
            dp_rank = protocol.choose_rank() if dp_rank is None else dp_rank
            protocol.check_rank(dp_rank)
            prepared = self.ranks.prepare(dataclasses.asdict(grammar), dp_rank)
            protocol.hold(dp_rank, num_tokens)
        try:
            await asyncio.wrap_future(prepared)
        finally:
            with self.ranks.lock:
                protocol.hold(dp_rank, num_tokens, -1)
        return dp_rank

    def _add(self, request_id: str, checked: EngineInput, arrival_time: float, dp_rank: int | None) -> _Client:
        with self.ranks.lock:
            if self.ranks.dead is not None:
                raise EngineDeadError(self.ranks.dead)
            children = self.output_processor.add_request(
                request_id, checked.prompt, checked.prompt_token_ids, checked.params, arrival_time
            )
            protocol = self.ranks.protocol
            dp_rank = protocol.choose_rank() if dp_rank is None else dp_rank  # the same for all: they share a prefix
            try:
                for child_id, params in children:
                    wire = params_on_the_wire(params)
                    add = Add(child_id, checked.prompt_token_ids, wire, checked.eos_token_id, arrival_time)
                    self.ranks.carry_out(protocol.add(add, dp_rank))
            except BaseException as error:
                self._drop([request_id])
                if isinstance(error, RuntimeError):
                    raise EngineDeadError(str(error)) from error
                raise
            self.output_processor.accepted(request_id, dp_rank)
            client = self._clients[request_id] = _Client(checked.params.output_kind)
            return client

    def _drop(self, request_ids: Iterable[str]) -> None:
        with self.ranks.lock:
            ids = list(request_ids)
            for request_id in ids:
                self._clients.pop(request_id, None)
            self.ranks.carry_out(self.ranks.protocol.abort(self.output_processor.abort_requests(ids)))

    def _hand_out(self, effects: Effects, dp_rank: int) -> None:
        """On the thread of ``ranks`` and under its lock."""
        found: dict[asyncio.AbstractEventLoop, list[tuple[_Client, RequestOutput | Exception]]] = {}

        def give(request_id: str, output: RequestOutput | Exception, ended: bool) -> None:
            client = self._clients.pop(request_id, None) if ended else self._clients.get(request_id)
            if client is not None:
                found.setdefault(client.loop, []).append((client, output))

        if (metrics := self.output_processor.metrics) is not None and (report := self.ranks.rank_stats[dp_rank]):
            metrics.record_rank(dp_rank, report)
        processed, stopped = self.output_processor.process_outputs(effects.outputs, dp_rank)
        self.ranks.carry_out(self.ranks.protocol.abort(stopped))
        for output in processed:
            give(output.request_id, output, output.finished)
        for child_id, (why, is_its_fault) in effects.failed.items():
            if (request_id := self.output_processor.owner_of(child_id)) is not None:
                give(request_id, ValueError(why) if is_its_fault else EngineDeadError(why), True)
                self._drop([request_id])
        for loop, outputs in found.items():
            if not _deliver(loop, outputs):
                self._drop([client_id for client_id, client in self._clients.items() if client.loop is loop])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Drop requests; ids that have ended are ignored. Whoever iterates over one gets an ``EngineGenerateError``."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        with self.ranks.lock:
            waiting = [client for one in ids if (client := self._clients.get(one)) is not None]
            self._drop(ids)
        for client in waiting:
            _deliver(client.loop, [(client, EngineGenerateError("the request was aborted"))])

    encode = refuse("vllm.AsyncLLM.encode")

    # --- how the engine stands ----------------------------------------------------------------------------------------

    @property
    def metrics(self) -> EngineMetrics | None:
        return self.output_processor.metrics

    @property
    def rank_stats(self) -> list[dict[str, float]]:
        return self.ranks.rank_stats

    @property
    def rank_waits(self) -> dict[int, list[int]]:
        return self.ranks.rank_waits

    def stats(self) -> list[dict[str, float]]:
        return self.ranks.rank_stats

    @property
    def is_running(self) -> bool:
        return self.ranks.is_running

    @property
    def errored(self) -> bool:
        return self.ranks.dead is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return None if self.ranks.dead is None else EngineDeadError(self.ranks.dead)

    async def check_health(self) -> None:
        """Raises ``EngineDeadError`` where the engine is lost or shut down, or its ranks are being started again."""
        if self.ranks.dead is not None or self.ranks.has_ended:
            raise EngineDeadError(self.ranks.dead or "the engine was shut down")

    def shutdown(self, timeout: float | None = None) -> None:
        """Take no more requests, let those that run end for ``timeout`` seconds (None: as long as they take), and
        return when all processes have gone. Blocks; again it does nothing."""
        atexit.unregister(self.shutdown)
        self.ranks.shutdown(timeout)
        self._tokenising.shutdown(wait=False)


def _deliver(loop: asyncio.AbstractEventLoop, outputs: list[tuple[_Client, RequestOutput | Exception]]) -> bool:
    """Not, where the loop was closed with requests in it."""

    def put() -> None:
        for client, output in outputs:
            client.put(output)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True


def make_launch(engine_args: EngineArgs, config: VllmConfig, **options: Any) -> Launch:
    if engine_args.distributed_executor_backend == "ray":
        check_installed()
    if options.get("by_torchrun"):
        sizes = config.parallel_config
        place = launchers.find_place()
        check_world_size(place.world_size, sizes.tensor_parallel_size, sizes.data_parallel_size)
    return Launch(
        arguments_as_json(engine_args), config.parallel_config.world_size, silence_s=silence_timeout(), **options
    )


def arguments_as_json(engine_args: EngineArgs) -> dict[str, Any]:
    """The arguments that differ from their defaults, for another process.

    Raises ``ValueError`` for one that only this process has.
    """
    found: dict[str, Any] = {"model": engine_args.model}
    for f in dataclasses.fields(engine_args)[1:]:
        value = getattr(engine_args, f.name)
        if value == (f.default if f.default_factory is dataclasses.MISSING else f.default_factory()):
            continue
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, CompilationConfig):
            mode = value.cudagraph_mode
            value = {**dataclasses.asdict(value), "cudagraph_mode": None if mode is None else mode.name}
        if callable(value):
            raise ValueError(f"{f.name}={value!r} is a function, which the ranks' processes do not have: give values")
        found[f.name] = value
    return found
