# SPDX-License-Identifier: Apache-2.0
"""The front end's side of a served engine: starts the ranks, talks with them, notices which of its parts is lost.

One thread does all of it. It runs ``FrontProtocol``, under ``lock``, which whoever adds or aborts requests takes too.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.engine.channel import Channel, Waker, accept
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.launch import ALIVE, KILL_RANKS, REFUSED, Agent, Launch, how_ended
from vllm.v1.engine.messages import Alive, Hello, Outputs, Prepare, Prepared, Ready
from vllm.v1.engine.protocol import Effects, FrontProtocol, Place, Silence, cause_of_loss

logger = init_logger(__name__)

_TICK_S = 1.0
_END_S = 20.0
# The kernel ends a dead agent's ranks before anybody can learn that the agent is dead. One that lives looks at its
# ranks four times a second, and learns which signal ended one.
_CAUSE_S = 1.0


class RankClient:
    """The ranks of an engine, and how they stand.

    ``on_effects`` gets, on this client's thread and under ``lock``, what becomes of requests, with the DP rank.
    ``rank_stats``: of each DP rank what it told last; ``rank_waits``: rank → ranks that hold it up. ``dead``: why the
    engine is lost, for good or until its ranks have been started again (``is_restarting``). ``ready``: what the first
    rank said of itself.
    """

    def __init__(self, launch: Launch, tensor_parallel_size: int, on_effects: Callable[[Effects, int], None]) -> None:
        self.launch, self.lock, self.on_effects = launch, threading.RLock(), on_effects
        self.places = {
            rank: Place(rank // tensor_parallel_size, rank % tensor_parallel_size == 0)
            for rank in range(launch.num_ranks)
        }
        self.dead: str | None = None
        self.is_restarting = self.has_ended = False
        self.ready: Ready | None = None
        self._waker, self._agent_words = Waker(), b""
        self._rounds: list[str] = []  # of ranks that were started together; the last is this one
        self._attempt = 0  # as the agent counts
        self._strangers: list[Channel] = []
        self._greeting = threading.Semaphore(len(self.places) + 16)
        self._changed = threading.Condition(self.lock)
        # Number → ranks that have not answered, and what waits for them.
        self._preparing: dict[int, tuple[set[int], Future[None]]] = {}
        self._numbers = itertools.count()
        self._begin()
        self._thread = threading.Thread(target=self._run, name="vllm-engine-client", daemon=True)

    def _begin(self) -> None:
        """Wait for the ranks, all of them new."""
        num_dp = 1 + max(place.dp_rank for place in self.places.values())
        self.protocol = FrontProtocol(self.places, self.launch.silence_s, time.monotonic(), self._cause_of)
        self.rank_stats: list[dict[str, float]] = [{} for _ in range(num_dp)]
        self.rank_waits: dict[int, list[int]] = {}
        self._channels: dict[int, Channel] = {}
        self._nodes: dict[int, str] = {}
        self._pids: list[int] = []
        self._ready: set[int] = set()

    # --- for callers --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when all ranks are ready; raises ``EngineDeadError`` where they will not be, ``ValueError`` where
        they cannot be started as was asked."""
        self._thread.start()
        with self.lock:
            while not self.is_running and self.dead is None:
                self._changed.wait()
            if self._agent_words.startswith(REFUSED):
                raise ValueError(self._agent_words[1:].decode())
            if self.dead is not None:
                raise EngineDeadError(self.dead)

    @property
    def is_running(self) -> bool:
        return self.dead is None and len(self._ready) == len(self.places) and not self.has_ended

    def carry_out(self, effects: Effects) -> None:
        """Send what ``effects`` say; call it under ``lock``."""
        for rank, message in effects.sends:
            if rank in self._channels:
                self._channels[rank].send(message)
        self._waker.wake()

    def prepare(self, structured_outputs: dict[str, Any], dp_rank: int) -> Future[None]:
        """Have the ranks of ``dp_rank`` make what a grammar needs; call it under ``lock``. Its result comes when all
        have, or ``EngineDeadError``."""
        if not self.is_running:
            raise EngineDeadError(self.dead or "the engine was shut down")
        number, future = next(self._numbers), Future[None]()
        ranks = {rank for rank, place in self.places.items() if place.dp_rank == dp_rank}
        self._preparing[number] = ranks, future
        for rank in ranks:
            self._channels[rank].send(Prepare(number, structured_outputs), counted=False)
        self._waker.wake()
        return future

    def _prepared(self, rank: int, number: int) -> None:
        ranks, future = self._preparing.get(number, (set[int](), None))
        ranks.discard(rank)
        if future is not None and not ranks:
            del self._preparing[number]
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                future.set_result(None)

    def _give_up_preparing(self, why: str) -> None:
        while self._preparing:
            with contextlib.suppress(InvalidStateError):
                self._preparing.popitem()[1][1].set_exception(EngineDeadError(why))

    def shutdown(self, timeout: float | None) -> None:
        """Take no more requests, let those that run end for ``timeout`` seconds (None: as long as they take), and
        return when all processes are gone."""
        with self.lock:
            if self.has_ended:
                return
            if self.is_running:
                self.carry_out(self.protocol.stop())
            else:
                self.protocol.stopping = True
                self._lose("the engine was shut down while its ranks were starting")
            self._changed.wait_for(lambda: not self.protocol.requests or self.has_ended, timeout)
            if ids := list(self.protocol.requests):
                effects = self.protocol.abort(ids)
                effects.failed = dict.fromkeys(ids, ("the engine was shut down before the request ended", False))
                self.carry_out(effects)
                self.on_effects(effects, 0)
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        if self._thread.is_alive():
            with self.lock:
                self._lose(f"its ranks did not leave within {_END_S:g} s")
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        host = "127.0.0.1" if self.launch.nnodes == 1 else self.launch.master_addr
        if self.launch.on_ray:
            host = get_ip()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        key = secrets.token_bytes(32)
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=len(self.places)))
            listener.setblocking(False)
            front_end = {"host": host, "port": listener.getsockname()[1], "key": key.hex()}
            self._agent = Agent(self.launch, {**front_end, "silence_s": self.launch.silence_s})
            self._agent_silence: Silence | None = None
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._welcome(listener, key))
            self._selector.register(self._waker, selectors.EVENT_READ, self._waker.clear)
            self._selector.register(self._agent.socket, selectors.EVENT_READ, self._hear_agent)
            try:
                self._loop()
            except Exception as error:
                logger.exception("the engine's client failed")
                with self.lock:
                    self._lose(f"the engine's client failed: {error!r}")
            finally:
                self._end_agent()
                with self.lock:
                    self._drop_channels()
                    self._give_up_preparing("the engine was shut down")
                    self.has_ended = True
                    self._changed.notify_all()

    def _loop(self) -> None:
        next_tick = time.monotonic()
        while True:
            now = time.monotonic()
            with self.lock:
                if now >= next_tick:
                    next_tick = now + _TICK_S
                    self._tick(now)
                while self._strangers:
                    channel = self._strangers.pop()
                    self._selector.register(channel, selectors.EVENT_READ, lambda c=channel: self._hear(c, None))
                self._write()
                if (self.dead is not None and not self.is_restarting) or self.protocol.has_ended:
                    return
            for found, _ in self._selector.select(max(next_tick - time.monotonic(), 0.0)):
                with self.lock:
                    if self._is_open(found.fileobj):
                        found.data()

    def _is_open(self, fileobj: Any) -> bool:
        """Not, where what was found before it in the same look has closed it."""
        return fileobj.fileno() >= 0 and fileobj in self._selector.get_map()

    def _welcome(self, listener: socket.socket, key: bytes) -> None:
        try:
            connected, _ = listener.accept()
        except OSError:  # it has gone again
            return
        if not self._greeting.acquire(blocking=False):
            connected.close()
            return

        def greet() -> None:
            try:
                channel = accept(connected, key)
            except Exception as error:
                logger.warning("refused a connection that does not have the engine's key: %r", error)
                return
            finally:
                self._greeting.release()
            with self.lock:
                self._strangers.append(channel)
            self._waker.wake()

        threading.Thread(target=greet, name="vllm-greeting", daemon=True).start()

    def _tick(self, now: float) -> None:
        self._agent.tell()
        if self._agent_silence is not None and self._agent_silence.silent(now):
            self._lose(f"the agent that started the ranks has given no sign of life for {self.launch.silence_s:g} s")
        elif self.is_running:
            self._take(self.protocol.tick(now))
        else:
            for channel in self._channels.values():
                channel.send(Alive(), counted=False)

    def _write(self) -> None:
        for rank, channel in list(self._channels.items()):
            if not self._is_open(channel):
                continue
            try:
                channel.write()
            except OSError:
                self._closed(rank)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            if self._selector.get_key(channel).events != wanted:
                self._selector.modify(channel, wanted, self._selector.get_key(channel).data)

    def _hear_agent(self) -> None:
        if self._read_agent():
            self._agent_silence = self._agent_silence or Silence(["agent"], self.launch.silence_s, time.monotonic())
            self._agent_silence.heard("agent", time.monotonic())
        else:
            self._selector.unregister(self._agent.socket)
            self._lose(self._how_agent_ended() or "the agent that started the ranks has closed its channel")

    def _read_agent(self) -> bool:
        """Whether more may come."""
        try:
            while said := self._agent.socket.recv(1 << 12):
                self._agent_words += said.replace(ALIVE, b"")
        except BlockingIOError:
            return True
        except ConnectionResetError:  # after its last words, where it ended with words of this process unread
            pass
        return False

    def _how_agent_ended(self) -> str | None:
        """What it said, or how it ended; None where it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._agent.process.wait(_CAUSE_S)
            self._read_agent()
            return self._agent_words[1:].decode() or f"the agent that started the ranks {how_ended(code)}"
        return None

    def _hear(self, channel: Channel, rank: int | None) -> None:
        try:
            received = channel.read()
        except (EOFError, OSError, msgspec.DecodeError) as error:
            self._forget(channel)
            if rank is not None:
                self._closed(rank, None if isinstance(error, EOFError | OSError) else f"said nonsense: {error}")
            return
        for number, message in received:
            if rank is None:
                rank = self._meet(channel, message)
                if rank is None:
                    return
            elif isinstance(message, Ready):
                self._note_ready(rank, message)
            elif isinstance(message, Prepared):
                self._prepared(rank, message.number)
            elif number:
                if isinstance(message, Outputs) and message.stats is not None:
                    self.rank_stats[self.places[rank].dp_rank] = message.stats
                elif isinstance(message, Alive):
                    self.rank_waits[rank] = message.waits_for
                self._take(self.protocol.receive(rank, number, message, time.monotonic()), self.places[rank].dp_rank)

    def _meet(self, channel: Channel, hello: Any) -> int | None:
        known = isinstance(hello, Hello) and hello.rank in self.places
        if known and hello.round not in self._rounds:
            if self._rounds and self.dead is None:
                self._lose(f"the ranks were started again, as rank {hello.rank} says")
            if self.is_restarting or (not self._rounds and self.dead is None):
                self._rounds.append(hello.round)
                self.dead, self.is_restarting = None, False
                self._begin()
        if not known or self.dead is not None or hello.round != self._rounds[-1] or hello.rank in self._channels:
            self._forget(channel)
            return None
        self._channels[hello.rank], self._attempt = channel, hello.attempt
        self._pids += [hello.pid] if hello.pid else []
        if hello.node:
            self._nodes[hello.rank] = hello.node
        self._selector.modify(channel, selectors.EVENT_READ, lambda: self._hear(channel, hello.rank))
        return hello.rank

    def _note_ready(self, rank: int, message: Ready) -> None:
        self._ready.add(rank)
        if rank == 0:
            self.ready = message
        self._changed.notify_all()

    def _take(self, effects: Effects, dp_rank: int = 0) -> None:
        if effects.lost is not None:
            self._lost(effects)
            return
        self.carry_out(effects)
        if effects.outputs or effects.failed:
            self.on_effects(effects, dp_rank)
            if not self.protocol.requests:
                self._changed.notify_all()

    def _closed(self, rank: int, how: str | None = None) -> None:
        self._forget(self._channels.pop(rank, None))
        if self.dead is None:
            self._take(self.protocol.closed(rank, how))

    def _cause_of(self, rank: int, how: str | None) -> str:
        """``how``: None where it ended without a word. It may not be the first: a rank that is killed makes its peers
        fail, an agent takes its ranks with it, and all may be found lost at once. One that fails of itself says why."""
        first = self._how_agent_ended()
        if first is not None and first.startswith("rank "):
            is_own = first.startswith(f"rank {rank} ")
            if (is_own and how is not None) or (not is_own and "ended with code" in first):
                first = None
        return first or cause_of_loss(rank, how)

    def _lose(self, reason: str) -> None:
        if self.dead is None:
            self._lost(self.protocol.lose(reason))
        elif self.is_restarting:
            self.is_restarting, self.dead = False, f"{self.dead}; then {reason}"
        self._waker.wake()

    def _lost(self, effects: Effects) -> None:
        """Every request in flight ends with the reason; the ranks end, and start again where they may."""
        assert effects.lost is not None, "nothing was lost"
        self.is_restarting = (
            max(len(self._rounds), 1) <= self.launch.max_restarts
            and not self.protocol.stopping
            and self._agent.process.poll() is None
        )
        again = "; its ranks are being started again, send the request anew" if self.is_restarting else ""
        self.dead = f"the engine was lost: {self._with_nodes(effects.lost)}{again}"
        logger.error("%s", self.dead)
        effects.failed = dict.fromkeys(effects.failed, (self.dead, False))
        self._drop_channels()
        self._give_up_preparing(self.dead)
        if self.is_restarting:
            self._agent.tell(KILL_RANKS + b"%d:%b;" % (self._attempt, ",".join(map(str, self._pids)).encode()))
        self.on_effects(effects, 0)
        self._changed.notify_all()

    def _with_nodes(self, reason: str) -> str:
        for rank, node in self._nodes.items():
            reason = re.sub(rf"\brank {rank}\b(?! on node)", rf"\g<0> on node {node}", reason)
        return reason

    def _forget(self, channel: Channel | None) -> None:
        if channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(channel)
            channel.close()

    def _drop_channels(self) -> None:
        for channel in self._channels.values():
            self._forget(channel)
        self._channels = {}

    def _end_agent(self) -> None:
        """The agent ends by itself where the ranks left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.dead is None:
                self._agent.process.wait(_END_S / 2)
        self._agent.kill()
        self._agent.socket.close()


def silence_timeout() -> float:
    if not envs.VLLM_SILENCE_TIMEOUT_S >= 2.0:
        raise ValueError(
            f"VLLM_SILENCE_TIMEOUT_S={envs.VLLM_SILENCE_TIMEOUT_S:g}: a living process says so once a second; give 2 "
            "or more"
        )
    return float(envs.VLLM_SILENCE_TIMEOUT_S)
