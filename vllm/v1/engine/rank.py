# SPDX-License-Identifier: Apache-2.0
"""One rank of a served engine: ``RankProtocol`` around ``EngineCore``.

The main thread steps, and sleeps while nothing is due. Another thread reads, writes and says once a second that this
rank lives, whatever the main thread does; where the front end is gone it ends the process. A third one makes grammars.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch

from vllm import envs, launchers
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.v1.debug import watchdog
from vllm.v1.engine.channel import Channel, Waker, connect
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.launch import FRONT_END, NODE
from vllm.v1.engine.messages import (
    Abort,
    Add,
    Alive,
    Failed,
    Hello,
    Message,
    Outputs,
    Prepare,
    Prepared,
    Ready,
    params_from_the_wire,
)
from vllm.v1.engine.protocol import Commands, RankProtocol, Silence
from vllm.v1.metrics.stats import rank_stats
from vllm.v1.outputs import EngineCoreOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import Grammars

logger = init_logger(__name__)

_TICK_S = 1.0
_LAST_WORDS_S = 2.0
# Steps that bring nothing tell how the rank stands this often.
_STATS_S = 0.5
_HEADER = 512
_SIZE = 8
_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Commands)


class Rank:
    """``num_ranks``, ``is_leader``: as of ``RankProtocol``."""

    def __init__(self, channel: Channel, protocol: RankProtocol, silence_s: float) -> None:
        self.channel, self.protocol, self._waker = channel, protocol, Waker()
        self._sources: list[Any] = [channel, self._waker]
        self._changed = threading.Condition()
        self._silence = Silence(["front"], silence_s, time.monotonic())
        self._reported: tuple[float, dict[str, float]] = (0.0, {})
        # When requests came that no step has taken yet: what they wait for a step's end is time in the queue.
        self._came: dict[str, float] = {}
        self.is_ready = self._is_closing = False
        self.grammars: Grammars | None = None
        self._preparing = ThreadPoolExecutor(1, "vllm-grammars")
        self._thread = threading.Thread(target=self._talk, name="vllm-rank-io", daemon=True)
        self._thread.start()

    # --- the thread that talks --------------------------------------------------------------------------------------

    def tell(self, messages: Iterable[Message], counted: bool = True) -> None:
        for message in messages:
            self.channel.send(message, counted)
        self._waker.wake()

    def _talk(self) -> None:
        try:
            self._talk_until_closed()
        except EOFError:
            self._lose("the front end has ended")
        except Exception as error:
            self._lose(f"what the front end said cannot be taken in: {error!r}")

    def _talk_until_closed(self) -> None:
        next_tick = time.monotonic()
        while not (self._is_closing and not self.channel.has_unsent):
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_S
                self.channel.send(Alive(watchdog.waits_for()), self.is_ready)
                if self._silence.silent(now):
                    self._lose(f"the front end has given no sign of life for {self._silence.bound:g} s")
            try:
                self.channel.write()
            except OSError as error:
                raise EOFError from error
            writable: list[Any] = [self.channel] if self.channel.has_unsent else []
            ready, _, _ = select.select(self._sources, writable, [], max(next_tick - now, 0.0))
            if self._waker in ready:
                self._waker.clear()
            if self.channel in ready:
                try:
                    received = self.channel.read()
                except OSError as error:
                    raise EOFError from error
                self._silence.heard("front", time.monotonic())
                with self._changed:
                    for number, message in received:
                        if isinstance(message, Prepare):
                            self._preparing.submit(self._prepare, message)
                        self.protocol.receive(number, message)
                        if isinstance(message, Add):
                            self._came[message.request_id] = time.monotonic()
                        elif isinstance(message, Abort):
                            for request_id in message.request_ids:
                                self._came.pop(request_id, None)
                    self._changed.notify()

    def _prepare(self, message: Prepare) -> None:
        """The first takes seconds, with the tokenizer; what is made here the step only copies."""
        assert self.grammars is not None, "a grammar came before this rank was ready"
        try:
            params = params_from_the_wire({"structured_outputs": message.structured_outputs}).structured_outputs
            assert params is not None, f"{message} has no grammar"
            self.grammars.check(params)
        except Exception as error:
            logger.debug("a grammar cannot be made: %r", error)
        self.tell([Prepared(message.number)], counted=False)

    def _lose(self, reason: str) -> None:
        if self.protocol.left or self._is_closing:
            return
        os.write(2, f"vllm: rank {os.environ.get('RANK', '0')} ends: {reason}\n".encode())
        os._exit(1)  # the main thread may be in a collective that never ends

    def close(self) -> None:
        """Send what is queued, for a moment at most."""
        self._is_closing = True
        self._waker.wake()
        self._thread.join(_LAST_WORDS_S)

    # --- the thread that steps --------------------------------------------------------------------------------------

    def serve(self, core: EngineCore) -> None:
        """Step until all ranks leave."""
        tp = get_tp_group()
        self.is_ready = True
        while True:
            with self._changed:
                while not self.protocol.is_due and not self.protocol.left:
                    self._changed.wait()
                if self.protocol.left:
                    return
                commands, tell = self.protocol.begin()
            self.tell(tell)
            with core.in_step():
                commands = share(commands, tp)
                rejected = _apply(commands, core, self._came)
                outputs = core.run_step()
            agreement = core.worker.runner.agreement
            assert agreement is not None, "a step ended without an agreement"
            with self._changed:
                tell = self.protocol.agreed(agreement.any_unfinished, agreement.all_stopping)
            if self.protocol.is_leader:
                self._report(agreement.step, outputs, rejected, core)
            self.tell(tell)

    def _report(self, step: int, outputs: list[EngineCoreOutput], rejected: dict[str, str], core: EngineCore) -> None:
        core.log_stats()
        now, (then, before) = time.monotonic(), self._reported
        if not outputs and not rejected and self.protocol.running and now - then < _STATS_S:
            return
        stats = None if core.vllm_config.disable_log_stats else rank_stats(core)
        if outputs or rejected or stats not in (None, before):
            self.tell([Outputs(step, outputs, rejected, stats)])
            self._reported = now, stats or {}


def share(commands: Commands, tp: GroupCoordinator) -> Commands:
    """What the group's first rank brings, on all its ranks: one broadcast, and a second one for what is long."""
    if tp.world_size == 1:
        return commands
    leads, data = tp.rank_in_group == 0, b""
    head = np.zeros(_HEADER, np.uint8)
    room = _HEADER - _SIZE
    if leads and commands != Commands():
        data = _encoder.encode(commands)
        head[:_SIZE] = np.frombuffer(len(data).to_bytes(_SIZE, "little"), np.uint8)
        head[_SIZE : _SIZE + len(data)] = np.frombuffer(data[:room], np.uint8)
    tp.cpu_broadcast(torch.from_numpy(head), "share_commands")
    size = int.from_bytes(head[:_SIZE].tobytes(), "little")
    if size > room:
        rest = np.frombuffer(bytearray(data[room:] if leads else size - room), np.uint8)
        tp.cpu_broadcast(torch.from_numpy(rest), "share_long_commands")
        head = np.concatenate([head, rest])
    if leads or not size:
        return commands
    return _commands.decode(head[_SIZE : _SIZE + size].tobytes())


def _apply(commands: Commands, core: EngineCore, came: dict[str, float]) -> dict[str, str]:
    """Returns the requests that can never run, with the reasons."""
    rejected: dict[str, str] = {}
    for add in commands.additions:
        queued_ts = came.pop(add.request_id, 0.0)
        try:
            params = params_from_the_wire(add.params)
            request = Request(add.request_id, add.prompt_token_ids, params, add.eos_token_id, add.arrival_time)
            request.queued_ts = queued_ts
            core.add_request(request)
        except (ValueError, TypeError, NotImplementedError) as error:
            rejected[add.request_id] = str(error)
    core.abort_requests(commands.aborts)
    core.worker.runner.stopping = commands.stopping
    return rejected


def find_front_end(place: launchers.Place) -> dict[str, Any]:
    """Address and key of the front end, and this ``round``'s name: a rank of its machine, which was told them, tells
    the others."""
    own = {**json.loads(os.environ.get(FRONT_END, "{}")), "round": uuid.uuid4().hex}
    if place.world_size == 1:
        return own
    store = parallel_state.find_store(place)
    if FRONT_END in os.environ:
        store.compare_set("vllm/front_end", "", json.dumps(own))
    store.wait(["vllm/front_end"], timedelta(seconds=envs.VLLM_LOAD_TIMEOUT_S))
    return json.loads(store.get("vllm/front_end").decode())


def run_rank(arguments: str) -> None:
    """The rank to its end. ``arguments``: of ``EngineArgs``, as JSON."""
    engine_args = EngineArgs(**json.loads(arguments))
    place = launchers.find_place()
    front = find_front_end(place)
    channel = connect(front["host"], front["port"], bytes.fromhex(front["key"]))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    pid = os.getpid() if FRONT_END in os.environ else 0
    channel.send(Hello(place.rank, front["round"], attempt, pid, os.environ.get(NODE, "")), counted=False)
    is_leader = place.rank % engine_args.tensor_parallel_size == 0
    rank = Rank(channel, RankProtocol(place.world_size, is_leader), front["silence_s"])
    try:
        config = engine_args.create_engine_config()
        core = EngineCore(config, engine_args.get_generation_config(config.model_config))
        length, blocks = core.vllm_config.model_config.max_model_len, core.scheduler.kv_cache_config.num_blocks
        rank.grammars = core.scheduler.grammars
        rank.tell([Ready(length, blocks)], counted=False)
        rank.serve(core)
    except BaseException as error:
        rank.tell([Failed(f"{type(error).__name__}: {error}")])
        rank.close()
        raise
    rank.close()
    core.shutdown()
