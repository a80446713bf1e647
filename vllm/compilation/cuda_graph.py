# SPDX-License-Identifier: Apache-2.0
"""Captured steps: a forward pass that is recorded once for each size and then replayed, without Python in between.

A captured step holds addresses and host values of the moment it was captured. It is right later only if every address
stays, and if no host value in it was one of that moment's requests. Neither is hoped for: each size is recorded twice,
with requests of other lengths, blocks, tokens, state slots and counts behind it, and the two recordings must be equal
call by call; then the second one is replayed on a third batch, whose result must be that of the eager pass, bit by bit.
Before each fill every input is set to a value that no batch has, so rows that a fill leaves out are seen. In service
the addresses of all inputs are compared before each replay.

On the host a step is the list of its kernels' records and runs in one call (``recording``). Collectives stay outside
and split it. All DP ranks agree in the step's one reduction whether they replay, and at which size.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from vllm import forward_context
from vllm.compilation.device_graph import GRAPH, DevicePool, DeviceRecorder
from vllm.compilation.recording import (
    Call,
    CaptureError,
    MemoryPool,
    NotCapturable,
    Recorder,
    memory_is_filled,
    without_garbage,
)
from vllm.config import CUDAGraphMode
from vllm.distributed import get_world_group
from vllm.kernels.cpu import records
from vllm.kernels.table import choose
from vllm.logger import init_logger, log_once
from vllm.model_executor.layers.layer import Layer
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.transfers import is_host
from vllm.v1.worker.batch_plan import BatchPlan
from vllm.v1.worker.dp_utils import CAPTURE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

# On the host a padding row costs what a real one does: a step that would get more than this share of them runs eagerly.
_PADDING_SHARE = 8
_TRIAL_BLOCKS = 4
_DEFAULT_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
# Over several ranks a step waits for the others more than it computes, and each capture takes as long as such steps.
_SIZES_OF_RANKS = (1, 2, 4, 8)
# On a device it costs next to nothing, and each size takes time and memory.
_DEVICE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Trial:
    """A batch that nobody asked for: ``scheduled`` [R] tokens of each request, which has ``seq_lens`` [R] after it."""

    scheduled: np.ndarray
    seq_lens: np.ndarray
    seed: int


@dataclass(frozen=True)
class ModelInputs:
    """What a forward pass reads: input_ids and positions [T], and the common metadata."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    common: CommonAttentionMetadata


class CapturedStep:
    """One size's step, to be replayed on what its inputs hold then.

    ``inputs``: name → address, shape and strides. ``program``: what is called, one after the other. ``outside``: the
    operators that are called between its pieces. ``kept``: must live as long as the step.
    """

    def __init__(
        self,
        size: int,
        program: Iterable[Callable[[], object]],
        outside: Iterable[str],
        hidden_states: torch.Tensor,
        inputs: dict[str, Any],
        kept: Any,
    ) -> None:
        self.size, self.hidden_states, self.inputs, self._kept = size, hidden_states, inputs, kept
        self.outside = sorted(set(outside))
        self._program = list(program)

    def replay(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Hidden states [size, hidden], to be read before the next replay of any size."""
        assert inputs == self.inputs, f"inputs moved since the step of {self.size} rows was captured: " + "; ".join(
            f"{name} was {self.inputs.get(name)}, is {inputs.get(name)}"
            for name in inputs.keys() | self.inputs.keys()
            if inputs.get(name) != self.inputs.get(name)
        )
        for run in self._program:
            run()
        return self.hidden_states

    @property
    def num_pieces(self) -> int:
        return len(self._program)


def _program(calls: Iterable[Call]) -> Iterable[Callable[[], object]]:
    """Neighbouring kernels as one call each, and what is between them."""
    kernels: list[Call] = []
    for call in calls:
        if call.kernel is not None:
            kernels.append(call)
        elif call.replay is not None:
            if kernels:
                yield _kernel_run(kernels)
                kernels = []
            yield call.replay
    if kernels:
        yield _kernel_run(kernels)


def _kernel_run(calls: list[Call]) -> Callable[[], None]:
    kernels = records.KernelRun([(call.kernel, call.given) for call in calls])

    def run() -> None:
        if refused := kernels.run():
            call = calls[refused - 1]
            raise AssertionError(
                f"{call.operator} in {call.layer or 'the model'} refuses its input: {records.describe(call)}"
            )

    return run


class ShortOfMemory(NotCapturable):
    """There is no memory to capture a step of this size with."""


class StepGraphs:
    """The captured steps of one engine, and which step may be replayed."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self.runner = runner
        config = runner.vllm_config
        self.mode = runner.graph_mode
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.is_stale = self.is_whole = False
        self.pool: MemoryPool | DevicePool = MemoryPool()
        if self.mode is not CUDAGraphMode.NONE and not is_host(runner.device):
            self.pool = DevicePool(runner.device, runner.platform)
        self.steps: dict[int, CapturedStep] = {}
        self.eager_operators: set[str] = set()  # called between the pieces
        self._hooks: list[Any] = []
        self._num_handles = -1
        self._held: list[Held] = []
        self._held_apart: list[Held] = []
        self._num_changes = 0
        self._homes: dict[str, torch.Tensor] = {}
        self.decode_only = self.mode is CUDAGraphMode.FULL_DECODE_ONLY
        self.given = config.compilation_config.cudagraph_capture_sizes
        self.saves_padding = is_host(runner.device) and not self.given and config.parallel_config.world_size == 1

    # --- in service -----------------------------------------------------------------------------------------------

    def vote(self, step: SchedulerOutput) -> int:
        """The highest mode that this rank could run ``step`` in, or CAPTURE; see ``DPVote``."""
        if self._is_replaced():
            self.forget()
        if self._is_hooked():
            return CUDAGraphMode.NONE
        if self.is_stale:
            # the batches of a capture write over what the caches hold
            is_held = len(self.runner.input_batch.row_of) > len(step.started) or any(step.num_computed_tokens)
            return CUDAGraphMode.NONE if is_held else CAPTURE
        if not self.steps:
            return CUDAGraphMode.NONE
        num_tokens, scheduled = step.total_num_scheduled_tokens, step.num_scheduled_tokens
        if num_tokens:
            size = self.size_for(num_tokens)
            if size is None or (self.decode_only and num_tokens > len(scheduled)):
                return CUDAGraphMode.NONE
            if self.saves_padding and (size - num_tokens) * _PADDING_SHARE > num_tokens:
                return CUDAGraphMode.NONE
        return self.highest

    def forget(self) -> None:
        """The caches go: what is captured reads them."""
        self.steps.clear()
        self._held, self._held_apart = [], []
        self.is_stale = self.is_on

    def _is_replaced(self) -> bool:
        """Whether a module has another tensor, such as weights that could not be put in the old ones' place."""
        looked_at = self._held_apart
        if Layer.num_changes != self._num_changes:
            self._num_changes = Layer.num_changes
            looked_at = looked_at + self._held
        return any(owner.get(name) is not held for owner, name, held in looked_at)

    def _is_hooked(self) -> bool:
        """Hooks of the model's modules are called in eager steps only. Where there was none, there is none before
        torch has given out the next handle of one."""
        if self._num_handles == RemovableHandle.next_id:
            return False
        if any(self._hooks):
            log_once(logger, logging.INFO, "steps run eagerly while the model's modules have forward hooks")
            return True
        self._num_handles = RemovableHandle.next_id
        return False

    @property
    def is_on(self) -> bool:
        """Where each layer is looked at, steps run eagerly."""
        return self.mode is not CUDAGraphMode.NONE and not self.runner.is_watched

    @property
    def highest(self) -> int:
        return CUDAGraphMode.FULL if self.is_whole else CUDAGraphMode.PIECEWISE

    def size_for(self, rows: int) -> int | None:
        return rows if rows in self.steps else min((size for size in self.steps if size >= rows), default=None)

    def bucket(self, rows: int) -> int:
        size = self.size_for(rows)
        assert size is not None, f"no captured size holds {rows} rows: {sorted(self.steps)}"
        return size

    def num_reqs(self, size: int) -> int:
        """Requests, those of padding included, in a captured step of ``size`` rows."""
        return min(size, self.max_num_seqs)

    def replay(self, inputs: ModelInputs) -> torch.Tensor:
        if memory_is_filled():
            self.pool.poison()
        self._at_home(inputs.common)
        size = inputs.input_ids.shape[0]
        is_profiled = torch.autograd._profiler_enabled()
        with torch.profiler.record_function(f"replay of {size} rows") if is_profiled else nullcontext():
            return self.steps[size].replay(_places(inputs))

    def _at_home(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """With the host's copies where what is called between the pieces of a captured step looks for them, in a
        replay too: staging memory takes turns."""
        if common.seq_lens_cpu.data_ptr() == common.seq_lens.data_ptr():
            return common
        copies: dict[str, Any] = {}
        for name in ("query_start_loc_cpu", "seq_lens_cpu"):
            x = getattr(common, name)
            if name not in self._homes:
                self._homes[name] = torch.empty(self.max_num_seqs + 1, dtype=x.dtype, device="cpu")
            copies[name] = self._homes[name][: len(x)].copy_(x)
        return dataclasses.replace(common, **copies)

    # --- capture --------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all sizes, the largest first; every rank of the world does so at the same time.

        Raises:
            CaptureError: a host value or an address of one batch is in the captured step, or it computes something
                else than the eager one.
        """
        self.forget()
        self.is_stale = False
        if self.is_on:
            self._num_handles = -1
            self._hooks = [h for m in self.runner.model.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
            loads = [x for m in self.runner.model.modules() if (x := getattr(m, "expert_load", None)) is not None]
            counted = [load.clone() for load in loads]
            with without_garbage():
                self._capture_all(self.sizes())
            self.runner.clear_states(range(1, self.runner.kv_cache_config.num_state_slots))
            for load, before in zip(loads, counted, strict=True):  # no batch of the captures' is anybody's
                load.copy_(before)
            self._num_changes = Layer.num_changes
            self._held, self._held_apart = tensors_held(self.runner.model)
        elif self.runner.is_watched and self.mode is not CUDAGraphMode.NONE:
            logger.info("steps are not captured: each layer is looked at (VLLM_DEBUG_NAN)")

    def _capture_all(self, sizes: Sequence[int]) -> None:
        began = time.monotonic()
        left_out: dict[type, tuple[str, list[int]]] = {}
        for size in reversed(sizes):
            try:
                self.steps[size] = self._capture_around(size)
            except NotCapturable as obstacle:
                left_out.setdefault(type(obstacle), (str(obstacle), []))[1].append(size)
            else:
                continue
            gc.collect()  # frames that an exception holds, and the memory that they hold
        for why, without in left_out.values():
            logger.warning("steps of %s rows are not captured: %s", " ".join(map(str, sorted(without))), why)
        if not self.steps:
            return
        one = self.steps[min(self.steps)]
        self.is_whole = all(step.num_pieces == 1 for step in self.steps.values())
        logger.info(
            "captured steps of %s rows in %.1f s, %.1f MiB%s",
            " ".join(map(str, sorted(self.steps))),
            time.monotonic() - began,
            self.pool.nbytes / 2**20,
            f"; {one.num_pieces} pieces, between them {', '.join(one.outside)}" if one.outside else "",
        )
        if (taken := self.pool.nbytes) > (left := self.runner.graph_bytes) and not is_host(self.runner.device):
            logger.warning(
                "captured steps take %.1f MiB, %.1f were left for them: with less than that free a step may fail; give "
                "fewer cudagraph_capture_sizes or a lower gpu_memory_utilization", taken / 2**20, left / 2**20,
            )  # fmt: skip

    def wanted_sizes(self) -> list[int]:
        """What is captured where the caches are large enough."""
        on_device = sorted({*_DEVICE_SIZES, min(self.max_num_seqs, _DEVICE_SIZES[-1])})
        on_host = _DEFAULT_SIZES if self.saves_padding else _SIZES_OF_RANKS
        sizes = self.given or (on_host if is_host(self.runner.device) else on_device)
        limit = self.max_num_seqs if self.decode_only or not self.given else self.runner.max_num_tokens
        return [size for size in sizes if size <= limit]

    def sizes(self) -> list[int]:
        runner = self.runner
        limit = self.max_num_seqs if self.decode_only else runner.max_num_tokens
        if is_host(runner.device) and (launched := self._interpreted()):
            logger.warning("steps are not captured: %s by kernels that run interpreted, in seconds", launched)
            return []
        least = min(runner.builders.values(), key=lambda builder: builder.cudagraph_support)
        support = least.cudagraph_support
        if support is AttentionCGSupport.NEVER:
            logger.warning("steps are not captured: %s has none that may be", type(least).__name__)
            return []
        if support is not AttentionCGSupport.ALWAYS:
            self.decode_only, limit = True, self.max_num_seqs
        cache = runner.kv_cache_config
        limit = min(limit, (cache.num_blocks - 1) * cache.block_size)
        if too_large := [size for size in self.given if size > limit]:
            logger.warning(
                "cudagraph_capture_sizes %s are not captured: steps of at most %d rows are", too_large, limit
            )
        return [size for size in self.wanted_sizes() if size <= limit]

    @staticmethod
    def _interpreted() -> str:
        """The operators that are neither C++ kernels nor torch's operations on the host: Triton's."""
        seen = ("cpu", "reference")
        return ", ".join(name for name, choice in choose("cpu").items() if choice.implementation not in seen)

    def _capture_around(self, size: int) -> CapturedStep:
        """The step of ``size`` rows, with the operators that cannot be captured called between its pieces."""
        while True:
            try:
                return self._capture(size)
            except NotCapturable as obstacle:
                if not obstacle.operator or obstacle.operator in self.eager_operators:
                    raise
                self.eager_operators.add(obstacle.operator)
                logger.warning("%s runs eagerly between the pieces of captured steps: %s", obstacle.operator, obstacle)
            except (MemoryError, torch.OutOfMemoryError) as error:
                if get_world_group().world_size > 1:
                    raise  # outside of what is recorded, where the other ranks go on
                raise ShortOfMemory(f"memory is short: {error}") from error
            gc.collect()

    def _capture(self, size: int) -> CapturedStep:
        first, second, third = self._trials(size)
        # Kernels are compiled, and what is made once is made.
        if isinstance(self.pool, DevicePool) or not self.steps:
            inputs, context = self._prepare(size, third)
            with context:
                self.runner.model(inputs.input_ids, inputs.positions)
        one, kept_before, *_ = self._record(size, first, captures=False)
        two, kept, hidden_states, places = self._record(size, second)
        compare(one, two, size)
        del kept_before  # whose addresses no tensor of the second recording may have
        outside = (x.operator for x in two if x.kernel is None and x.replay is not None and x.operator != GRAPH)
        step = CapturedStep(size, _program(two), outside, hidden_states, places, kept)
        self._check(step, third)
        return step

    def _recorder(self, captures: bool) -> Recorder | DeviceRecorder:
        """On a device one pass runs eagerly, on the stream of captures, and the other is captured."""
        layer, set_layer = lambda: forward_context.get_place().layer, forward_context.set_current_layer
        if isinstance(self.pool, DevicePool):
            return DeviceRecorder(self.pool, layer, set_layer, captures, self.eager_operators)
        return Recorder(self.pool, layer, set_layer, self.eager_operators)

    def _record(
        self, size: int, trial: Trial, captures: bool = True
    ) -> tuple[Sequence[Call], Any, torch.Tensor, dict[str, Any]]:
        recorder = self._recorder(captures)
        inputs, context = self._prepare(size, trial)
        is_whole, obstacle = False, None
        try:
            with context, recorder.recording():
                hidden_states = self.runner.model(inputs.input_ids, inputs.positions)
                is_whole = True
        except NotCapturable as error:
            obstacle = NotCapturable(str(error), error.operator)
        except (MemoryError, torch.OutOfMemoryError) as error:
            if not is_whole:
                raise
            obstacle = ShortOfMemory(f"memory is short: {error}")
        raise_on_all_ranks(obstacle)
        calls, kept = recorder.take_over()
        hidden_states = self.pool.alias(hidden_states)
        if not self.pool.is_free:
            raise CaptureError(
                f"the model keeps a tensor that it made in a step of {size} rows, which the next one would overwrite"
            )
        return calls, kept, hidden_states, _places(inputs)

    def _check(self, step: CapturedStep, trial: Trial) -> None:
        """Raise ``CaptureError`` unless the replayed step computes what the eager one does."""
        real = int(trial.scheduled.sum())
        inputs, context = self._prepare(step.size, trial)
        with context:
            expected = self.runner.model(inputs.input_ids, inputs.positions)[:real].clone()
        inputs, context = self._prepare(step.size, trial)
        with context:
            found = step.replay(_places(inputs))[:real]
        if not torch.equal(_bits(found), _bits(expected)):
            rows = (_bits(found) != _bits(expected)).any(1).nonzero().flatten().tolist()
            raise CaptureError(
                f"the captured step of {step.size} rows differs from the eager one in rows {rows[:8]} of {real}: "
                "something in it is of the batch that it was captured with; set enforce_eager=True and report it"
            )

    # --- batches to capture with ------------------------------------------------------------------------------------

    def _trials(self, size: int) -> tuple[Trial, Trial, Trial]:
        """Three batches that share no count, length, block, slot or token: a full one, one with padding rows and
        requests, and one between them."""
        R, limit = self.num_reqs(size), self.runner.vllm_config.model_config.max_model_len
        blocks = self.runner.kv_cache_config
        limit = min(limit, _TRIAL_BLOCKS * blocks.block_size)
        limit = min(limit, (blocks.num_blocks - 1) // R * blocks.block_size or blocks.block_size)
        trials = []
        for seed, requests in enumerate((R, R // 2, max(R - R // 3 - 1, 1))):
            rng = np.random.default_rng(1000 * size + seed)
            scheduled = np.ones(requests, dtype=np.int64)
            if requests and not self.decode_only and seed != 1:
                extra = min(size - requests - seed, limit - 1)
                scheduled[rng.integers(requests)] += max(extra, 0)
            longest = max(limit // (1, 3, 2)[seed], 1)
            lengths = np.maximum(rng.integers(0, longest, requests, endpoint=True), scheduled)
            lengths[:1] = max(longest, int(scheduled.max(initial=0)))
            trials.append(Trial(scheduled, np.maximum(lengths, scheduled), seed))
        return trials[0], trials[1], trials[2]

    def _prepare(self, size: int, trial: Trial) -> tuple[ModelInputs, Any]:
        """The inputs of ``trial``, padded to ``size`` rows, and the context to run the model in."""
        runner, cache = self.runner, self.runner.kv_cache_config
        parallel, R = runner.vllm_config.parallel_config, self.num_reqs(size)
        requests, tokens = len(trial.scheduled), int(trial.scheduled.sum())
        rng = np.random.default_rng(trial.seed)
        plan = BatchPlan(
            step=-1,
            num_reqs_unpadded=requests,
            num_reqs_padded=R,
            num_tokens_unpadded=tokens,
            num_tokens_padded=size,
            num_tokens_unpadded_across_dp=(tokens,) * parallel.data_parallel_size,
            num_tokens_padded_across_dp=(size,) * parallel.data_parallel_size,
            dp_rank=runner.dp_rank,
            cudagraph_mode=CUDAGraphMode.PIECEWISE,
        )
        # Requests share no block where there are enough of them.
        table = np.zeros((requests, runner.input_batch.block_table.max_blocks), dtype=np.int32)
        columns = -(-trial.seq_lens // cache.block_size)
        # among the first blocks: what no request has used yet takes no memory of the host's
        order = rng.permutation(min(cache.num_blocks - 1, 2 * int(columns.sum()) + 8)) + 1
        for row, count in enumerate(columns):
            table[row, :count] = np.resize(np.roll(order, -int(columns[:row].sum())), count)
        of_token = np.repeat(np.arange(requests), trial.scheduled)
        starts = np.cumsum(trial.scheduled) - trial.scheduled
        positions = np.arange(tokens) + (trial.seq_lens - trial.scheduled - starts)[of_token]
        slots = table[of_token, positions // cache.block_size].astype(np.int64) * cache.block_size
        slots += positions % cache.block_size
        states = trial.seed % 2 + np.arange(1, requests + 1)
        states = np.where(states < max(cache.num_state_slots, 1), states, 0)
        runner.clear_states(states)
        ids = rng.integers(0, runner.vllm_config.model_config.vocab_size, tokens)
        with runner.buffers.filling():
            runner.buffers.overwrite()
            rows = np.arange(requests)
            inputs = ModelInputs(
                runner.buffers.input_ids.fill(ids, size),
                runner.buffers.positions.fill(positions, size),
                runner.fill_metadata(plan, trial.scheduled, trial.seq_lens, rows, table, slots, states),
            )
        runner.stream.wait()
        inputs = dataclasses.replace(inputs, common=self._at_home(inputs.common))
        read = {name: x for name, x in _tensors(inputs).items() if name != "block_table"}
        read["block_table"] = inputs.common.block_table[:, : max(columns.max(initial=0), 1)]
        if left := runner.buffers.not_filled(read):
            raise CaptureError(
                f"{left} keep rows of an earlier batch: with {tokens} tokens of {requests} requests not all rows were "
                f"written that a step of {size} reads"
            )
        return inputs, runner.forward_context(plan, inputs.common)


def raise_on_all_ranks(obstacle: NotCapturable | None) -> None:
    """What keeps one rank from capturing a step keeps all: they have the same captured sizes, and may replay any.

    Each calls this at the end of its pass, in whose collectives the others wait.
    """
    world = get_world_group()
    for rank, found in enumerate(world.all_gather_object(obstacle)):
        if found is not None:
            raise type(found)(f"{found} (rank {rank})" if world.world_size > 1 else str(found), found.operator)


def compare(one: Sequence[Call], two: Sequence[Call], size: int) -> None:
    """Raise ``CaptureError``, naming operator, argument and both values, where two recordings differ: then a value or
    an address of one batch went into them."""
    for a, b in zip(one, two, strict=False):
        where = f"capturing {size} rows, in {b.layer or 'the model'}"
        if a.operator != b.operator:
            raise CaptureError(
                f"{where}: {a.operator} with one batch, {b.operator} with another: the model asks the host"
            )
        if a.given != b.given:
            raise CaptureError(
                f"{where}: {b.operator} was given {records.difference(a, b)}, with another batch: a value of the host "
                "would stay as it was when the step was captured"
            )
    if len(one) != len(two):
        raise CaptureError(f"capturing {size} rows: {len(one)} calls with one batch, {len(two)} with another")


# A tensor's owner's dict, its name in there, itself.
Held = tuple[dict[str, Any], str, Any]


def tensors_held(model: torch.nn.Module) -> tuple[list[Held], list[Held]]:
    """What of the model's modules is a tensor, or holds some: the attributes of layers, which say when they change, and
    all others."""

    def is_one(held: Any) -> bool:
        parts: Iterable[Any] = ()
        if isinstance(held, (list, tuple)):
            parts = held
        elif dataclasses.is_dataclass(held):
            parts = vars(held).values()
        return isinstance(held, torch.Tensor) or any(map(is_one, parts))

    told: list[Held] = []
    apart: list[Held] = []
    for module in model.modules():
        for owner in (vars(module), module._parameters, module._buffers):
            found = told if isinstance(module, Layer) and owner is vars(module) else apart
            found += [(owner, name, held) for name, held in owner.items() if is_one(held)]
    return told, apart


def _tensors(inputs: ModelInputs) -> dict[str, torch.Tensor]:
    """Those that a captured step may read: the host's are for what prepares it, and may take turns."""
    found = {"input_ids": inputs.input_ids, "positions": inputs.positions, **vars(inputs.common)}
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor) and not name.endswith("_cpu")}


def _places(inputs: ModelInputs) -> dict[str, Any]:
    """Where each of a step's input tensors lies."""
    return {name: (x.data_ptr(), x.shape, x.stride()) for name, x in _tensors(inputs).items()}


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
