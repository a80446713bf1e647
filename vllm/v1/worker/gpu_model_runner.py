# SPDX-License-Identifier: Apache-2.0
"""Runs one step of the model: plan → agree → pad → metadata → forward → sample.

``launch`` does the host's part and hands the rest to the device's stream; ``finish`` waits for what comes back. Between
the two the next step may be launched: what it reads of this one (sampled tokens, caches, states) is read on the stream.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import add
from typing import Any

import numpy as np
import torch

from vllm.compilation.cuda_graph import ModelInputs, StepGraphs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_dp_group, get_tp_group
from vllm.distributed.eplb import ExpertLoadBalancer
from vllm.forward_context import DPMetadata, ForwardContext, run_in_context, set_current_step, set_forward_context
from vllm.kernels.table import choose
from vllm.logger import init_logger
from vllm.model_executor.layers.step_buffers import StepBuffers
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.platforms import Platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.debug import watchdog
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.metrics.stats import StepCounts
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler, SamplerOutput
from vllm.v1.sample.state import SamplingState
from vllm.v1.transfers import HostCopies, Stream, ThreadStream, is_host, to_device
from vllm.v1.worker.batch_plan import BatchPlan
from vllm.v1.worker.dp_utils import CAPTURE, DPAgreement, coordinate_batch_across_dp, pads_to_max
from vllm.v1.worker.gpu_input_batch import BatchLayout, InputBatch
from vllm.v1.worker.host_inputs import HostInputs
from vllm.v1.worker.input_buffers import InputBuffers, LastSampled
from vllm.v1.worker.step_memory import PROMPT_LOGPROB_ROWS, largest_step_bytes

logger = init_logger(__name__)


@dataclass(frozen=True)
class StepInputs(ModelInputs):
    """What one step computes on. ``logits_rows``: the token rows that a token is sampled from, None for the first ones;
    ``sampled_rows`` the batch row of each.

    ``reads_sampled``: an input -1 - r stands for the token that row r of the batch sampled last."""

    layout: BatchLayout
    logits_rows: torch.Tensor | None
    sampled_rows: torch.Tensor
    reads_sampled: bool

    def is_of(self, layout: BatchLayout, plan: BatchPlan) -> bool:
        """Whether a replayed step of ``plan`` has the same tensors and sizes."""
        return self.layout is layout and self.common.num_padded_tokens == plan.num_tokens_padded


@dataclass
class LaunchedStep:
    """A step between ``launch`` and ``finish``; without ``inputs`` no rank runs anything. The stream fills in the rest:
    what it sampled and scored, on its way to the host. ``chosen``: the sampling parameters by sampled row."""

    scheduler_output: SchedulerOutput
    plan: BatchPlan
    copies: HostCopies
    inputs: StepInputs | None = None
    chosen: Sequence[Any] = ()
    hidden_states: torch.Tensor | None = None
    sampled: SamplerOutput | None = None
    prompt_logprobs: dict[str, list[LogprobsTensors]] = field(default_factory=dict)


class GPUModelRunner:
    """Holds the model, its inputs and its caches on one rank, whatever the device."""

    def __init__(self, vllm_config: VllmConfig, platform: Platform, device: torch.device) -> None:
        self.vllm_config, self.platform, self.device = vllm_config, platform, device
        self.model: CausalLM
        scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
        self.max_num_tokens = vllm_config.compilation_config.padded_size(scheduler.max_num_batched_tokens)
        asked = vllm_config.compilation_config.cudagraph_mode
        self.graph_bytes = 0  # what was left for captured steps on a device when the caches were sized
        self.graph_mode = CUDAGraphMode[
            platform.choose_graph_mode(None if asked is None else asked.name, parallel.world_size)
        ]
        self.sampler = Sampler(vllm_config.model_config.logprobs_mode)
        self.pad_to_max = pads_to_max(platform.policies, parallel.enable_expert_parallel, parallel.data_parallel_size)
        self.dp_rank = get_dp_group().rank_in_group
        self.is_watched = False  # the model's layers are looked at one by one, so each step runs eagerly
        self.step = 0
        self.counts = StepCounts()
        self.balancer: ExpertLoadBalancer | None = None
        self.step_buffers = StepBuffers(self.max_num_tokens, self.device)
        self._outside_layers = ForwardContext(None, step_buffers=self.step_buffers)
        self.any_unfinished_across_dp = False
        self.stopping = False  # vote to leave
        self.has_overwritten_caches = False  # by batches of captures
        self.agreement: DPAgreement | None = None
        model_config, cache, max_num_reqs = vllm_config.model_config, vllm_config.cache_config, scheduler.max_num_seqs
        # DP ranks serve different requests: those without a seed of their own draw differently on each.
        seed = model_config.seed + get_dp_group().rank_in_group
        self.is_host = is_host(device)
        is_threaded = scheduler.async_scheduling and self.is_host
        self.stream: Stream = ThreadStream(watchdog.fail_in_step) if is_threaded else Stream(device)
        sampling = SamplingState(max_num_reqs, model_config.vocab_size, device, seed, self.stream)
        self.input_batch = InputBatch(max_num_reqs, model_config.max_model_len, cache.block_size, sampling)
        max_blocks = self.input_batch.block_table.max_blocks
        self.buffers = InputBuffers(self.max_num_tokens, max_num_reqs, max_blocks, device, self.stream)
        self.last_sampled = LastSampled(max_num_reqs, device)
        self.host_inputs: HostInputs | None = None
        self._kept_inputs: StepInputs | None = None
        self._inference = torch.inference_mode()

    # --- set-up -------------------------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name → what the layer keeps between steps."""
        return {name: layer.get_kv_cache_spec() for name, layer in self._cached_layers().items()}

    def _cached_layers(self) -> dict[str, Any]:
        modules: Iterator[Any] = self.model.modules()
        return {m.layer_name: m for m in modules if hasattr(m, "get_kv_cache_spec")}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the caches: after this nothing that lives longer than a step is allocated."""
        self.kv_cache_config = kv_cache_config
        self.cached_layers = self._cached_layers()
        for layer in self.cached_layers.values():
            layer.bind_kv_cache(kv_cache_config)
        backends = {layer.backend for layer in self.cached_layers.values()}
        self.builders = {backend: backend.builder_cls(kv_cache_config) for backend in backends}
        self.layers_of = {b: [name for name, x in self.cached_layers.items() if x.backend is b] for b in backends}
        if not self.stream.is_late and choose("cpu")["row_max"].implementation == "cpu":
            self.host_inputs = HostInputs(self.input_batch, self.buffers, self.last_sampled)
        self.graphs = StepGraphs(self)

    @torch.inference_mode()
    def capture_model(self) -> None:
        self.graphs.capture()

    def release_kv_cache(self) -> None:
        if hasattr(self, "graphs"):
            self.graphs.forget()
        for layer in self.cached_layers.values():
            layer.unbind_kv_cache()

    def restore_kv_cache(self) -> None:
        """Empty caches of the old size."""
        for layer in self.cached_layers.values():
            layer.bind_kv_cache(self.kv_cache_config)

    @torch.inference_mode()
    def profile_run(self) -> int:
        """Bytes that the largest step takes, on this rank; see ``largest_step_bytes``."""
        return largest_step_bytes(self)

    # --- one step -----------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, has_unfinished: bool) -> ModelRunnerOutput:
        """Run the scheduled tokens, or a dummy where other DP ranks have some; every rank calls this in every step."""
        return self.finish(self.launch(scheduler_output, has_unfinished))

    def launch(self, scheduler_output: SchedulerOutput, has_unfinished: bool) -> LaunchedStep:
        """Agree on the step, write its inputs and launch it. The step before need not have ended."""
        with self._inference:
            self._update_states(scheduler_output)
            plan = self._agree(scheduler_output, has_unfinished)
            step = LaunchedStep(scheduler_output, plan, HostCopies(self.stream))
            if plan.num_tokens_padded == 0:
                return step
            with self.buffers.filling():
                inputs = step.inputs = self._prepare_inputs(scheduler_output, plan)
            self.stream.launch(partial(self._forward, step, inputs))
            if not plan.is_dummy:
                metadata = self._sampling_metadata(step, inputs)
                self.stream.launch(partial(self._sample_and_score, step, inputs, metadata))
            step.copies.close()
            return step

    def finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        """Wait for a launched step's results."""
        step.copies.wait()
        return ModelRunnerOutput() if step.inputs is None or step.plan.is_dummy else self._to_output(step, step.inputs)

    def _forward(self, step: LaunchedStep, inputs: StepInputs) -> None:
        set_current_step(step.plan.step)
        if self.balancer is not None and self.balancer.before_step(step.plan.step):
            self.model.forget_weight_specs()
        if inputs.reads_sampled:
            self.last_sampled.fill_in(inputs.input_ids)
        if step.plan.cudagraph_mode == CUDAGraphMode.FULL:  # no Python in it that would ask for the context
            step.hidden_states = self.graphs.replay(inputs)
            return
        with self.forward_context(step.plan, inputs.common):
            if step.plan.cudagraph_mode:
                step.hidden_states = self.graphs.replay(inputs)
            else:
                step.hidden_states = self.model(inputs.input_ids, inputs.positions)

    def _sample_and_score(self, step: LaunchedStep, inputs: StepInputs, metadata: SamplingMetadata | None) -> None:
        hidden_states, step.hidden_states = step.hidden_states, None
        assert hidden_states is not None, f"step {step.plan.step} samples before its forward pass"
        with run_in_context(self._outside_layers, step.plan.step):
            step.prompt_logprobs = self._score_prompts(step.scheduler_output, inputs, hidden_states, step.copies)
            if metadata is not None:
                step.sampled = self._sample(inputs, metadata, hidden_states, step.copies)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Free the rows of requests that ended or were preempted, give rows to those that start, note new blocks."""
        batch = self.input_batch
        gone = (scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids) & batch.row_of.keys()
        for request_id in sorted(gone, key=batch.row_of.__getitem__):  # a set's order differs between processes
            batch.remove(request_id)
        started = scheduler_output.started
        for request, block_ids in zip(scheduler_output.requests, scheduler_output.new_block_ids, strict=True):
            if request.request_id in started:
                batch.add(request, block_ids)
                self._clear_state(request.state_slot)
            elif block_ids:
                batch.append_blocks(request.request_id, block_ids)

    def clear_states(self, state_slots: Iterable[int]) -> None:
        for state_slot in state_slots:
            self._clear_state(int(state_slot))

    def _clear_state(self, state_slot: int) -> None:
        """On the stream: who had the slot before may still write it."""
        if state_slot >= 0:
            for layer in self.cached_layers.values():
                if hasattr(layer, "clear_state"):
                    self.stream.launch(partial(layer.clear_state, state_slot))

    def _agree(self, scheduler_output: SchedulerOutput, has_unfinished: bool) -> BatchPlan:
        """One reduction over the DP ranks decides the step's sizes and whether anyone has work left."""
        num_tokens, parallel = scheduler_output.total_num_scheduled_tokens, self.vllm_config.parallel_config
        begun = time.perf_counter()
        agreement = coordinate_batch_across_dp(
            num_tokens,
            step=self.step,
            has_unfinished=has_unfinished,
            num_tokens_padded=self.vllm_config.compilation_config.padded_size(num_tokens) if num_tokens else 0,
            cudagraph_mode=self.graphs.vote(scheduler_output),
            bucket=self.graphs.bucket,
            pad_to_max=self.pad_to_max,
            stopping=self.stopping,
            work=self._digest_of(scheduler_output) if parallel.tensor_parallel_size > 1 else 0,
        )
        waited = time.perf_counter() - begun if parallel.world_size > 1 else 0.0
        self.step += 1
        if agreement.cudagraph_mode == CAPTURE:
            self.stream.wait()
            self.graphs.capture()
            self.has_overwritten_caches = True
        self.agreement, self.any_unfinished_across_dp = agreement, agreement.any_unfinished
        captured = self.graphs.num_reqs(agreement.num_tokens_padded)
        plan = BatchPlan.make(agreement, len(scheduler_output.requests), captured)
        self.counts.record(plan, waited)
        return plan

    def _digest_of(self, scheduler_output: SchedulerOutput) -> int:
        """A digest of what the step runs: rows and counts always, tokens and parameters where a request starts.

        Later tokens come over a broadcast and need no check; ids are names that each rank may give as it likes.
        """
        requests, rows = scheduler_output.requests, self.input_batch.row_of
        table = [[rows[r.request_id] for r in requests], scheduler_output.num_computed_tokens]
        table.append(scheduler_output.num_scheduled_tokens)
        digest = zlib.crc32(repr(table).encode())
        for request in requests:
            if request.request_id in scheduler_output.started:
                digest = zlib.crc32(np.array(request.all_token_ids, dtype=np.int64).tobytes(), digest)
                digest = zlib.crc32(f"{vars(request.sampling_params)} {request.eos_token_id}".encode(), digest)
        return digest >> 1

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, plan: BatchPlan) -> StepInputs:
        """Write every row of every persistent buffer that this step reads."""
        layout, computed = self.input_batch.layout(scheduler_output), scheduler_output.num_computed_tokens
        if self.host_inputs is None:
            return self._fill_inputs(layout, computed, plan)
        self.host_inputs.write(layout, plan.num_reqs_padded, plan.num_tokens_padded, computed)
        kept, is_whole = self._kept_inputs, plan.cudagraph_mode == CUDAGraphMode.FULL
        if is_whole and kept is not None and kept.is_of(layout, plan):
            return kept
        seq_lens = list(map(add, computed, scheduler_output.num_scheduled_tokens))
        max_lens = max(scheduler_output.num_scheduled_tokens, default=0), max(seq_lens, default=0)
        inputs = self._inputs_of(layout, plan, self._metadata_of(plan, *max_lens))
        self._kept_inputs = inputs if is_whole else None
        return inputs

    def _inputs_of(
        self, layout: BatchLayout, plan: BatchPlan, common: CommonAttentionMetadata, reads_sampled: bool = False
    ) -> StepInputs:
        """What the buffers hold."""
        buffers, num_sampled = self.buffers, len(layout.sampling)
        return StepInputs(
            input_ids=buffers.input_ids.rows(plan.num_tokens_padded),
            positions=buffers.positions.rows(plan.num_tokens_padded),
            common=common,
            layout=layout,
            logits_rows=None if layout.logits_are_first else buffers.logits_rows.rows(num_sampled),
            sampled_rows=buffers.sampled_rows.rows(num_sampled),
            reads_sampled=reads_sampled,
        )

    def _fill_inputs(self, layout: BatchLayout, num_computed_tokens: Sequence[int], plan: BatchPlan) -> StepInputs:
        """``_prepare_inputs`` on any device; see ``HostInputs``."""
        batch, buffers, num_padded = self.input_batch, self.buffers, plan.num_tokens_padded
        rows_of_tokens, num_sampled = layout.rows_of_tokens, len(layout.sampling)
        computed = np.array(num_computed_tokens, dtype=np.int64)
        positions = computed[layout.request_of_token] + layout.offsets
        common = self.fill_metadata(
            plan,
            layout.scheduled,
            computed + layout.scheduled,
            layout.rows,
            batch.block_table.table,
            batch.block_table.slots(rows_of_tokens, positions),
            layout.state_slots,
        )
        is_sampled = positions >= batch.num_given[rows_of_tokens]
        input_ids = np.where(is_sampled, -1 - rows_of_tokens, batch.token_ids[rows_of_tokens, positions])
        buffers.input_ids.fill(input_ids, num_padded)
        buffers.positions.fill(positions, num_padded)
        if not layout.logits_are_first:
            buffers.logits_rows.fill(layout.logits_rows, num_sampled)
        buffers.sampled_rows.fill(layout.sampled_rows, num_sampled)
        return self._inputs_of(layout, plan, common, reads_sampled=bool(is_sampled.any()))

    def _sampling_metadata(self, step: LaunchedStep, inputs: StepInputs) -> SamplingMetadata | None:
        """How the step's tokens are sampled; None where none is."""
        layout, output, state = inputs.layout, step.scheduler_output, self.input_batch.sampling
        if not layout.sampling:
            return None

        def num_outputs() -> list[int]:
            ends = map(add, output.num_computed_tokens, output.num_scheduled_tokens)
            numbers = [end - request.num_prompt_tokens for end, request in zip(ends, output.requests, strict=True)]
            return [numbers[i] for i in layout.sampling]

        metadata = state.make_metadata(layout.rows_sampled, num_outputs)
        step.chosen = state.chosen()
        return metadata

    def fill_metadata(
        self,
        plan: BatchPlan,
        scheduled: np.ndarray,
        seq_lens: np.ndarray,
        rows: np.ndarray,
        block_table: np.ndarray,
        slots: np.ndarray,
        state_slots: np.ndarray,
    ) -> CommonAttentionMetadata:
        """Of requests that run ``scheduled`` [R] tokens each, the last of ``seq_lens`` [R]: their ``rows`` [R] of
        ``block_table``, their tokens' cache ``slots`` and their own ``state_slots`` [R]; padded as the plan says."""
        buffers, max_seq_len = self.buffers, max(seq_lens.tolist(), default=0)
        buffers.block_table.fill_columns(block_table, rows, self._num_columns(max_seq_len), plan.num_reqs_padded)
        buffers.fill_query_start_loc(scheduled, plan.num_reqs_padded)
        buffers.seq_lens.fill(seq_lens, plan.num_reqs_padded)
        buffers.slot_mapping.fill(slots, plan.num_tokens_padded)
        buffers.state_indices.fill(state_slots, plan.num_reqs_padded)
        return self._metadata_of(plan, max(scheduled.tolist(), default=0), max_seq_len)

    def _num_columns(self, max_seq_len: int) -> int:
        """Of the block table, in a step whose longest request has so many tokens."""
        return max(-(-max_seq_len // self.input_batch.block_table.block_size), 1)

    def _metadata_of(self, plan: BatchPlan, max_query_len: int, max_seq_len: int) -> CommonAttentionMetadata:
        """Of a step that has been filled in."""
        buffers = self.buffers
        table = buffers.block_table.rows(plan.num_reqs_padded, self._num_columns(max_seq_len))
        if plan.cudagraph_mode:
            table = buffers.block_table.rows(plan.num_reqs_padded)
        # what holds for every step of the size; on the host a step in pieces is told its own
        if plan.cudagraph_mode == CUDAGraphMode.FULL or (plan.cudagraph_mode and not self.is_host):
            max_seq_len = self.vllm_config.model_config.max_model_len
            max_query_len = 1 if self.graphs.decode_only else plan.num_tokens_padded
        return CommonAttentionMetadata(
            query_start_loc=buffers.query_start_loc.rows(plan.num_reqs_padded + 1),
            query_start_loc_cpu=buffers.query_start_loc.host_rows(plan.num_reqs_padded + 1),
            seq_lens=buffers.seq_lens.rows(plan.num_reqs_padded),
            seq_lens_cpu=buffers.seq_lens.host_rows(plan.num_reqs_padded),
            block_table=table,
            slot_mapping=buffers.slot_mapping.rows(plan.num_tokens_padded),
            state_indices=buffers.state_indices.rows(plan.num_reqs_padded),
            num_reqs=plan.num_reqs_padded,
            num_actual_tokens=plan.num_tokens_unpadded,
            num_padded_tokens=plan.num_tokens_padded,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            is_captured=bool(plan.cudagraph_mode),
        )

    def forward_context(self, plan: BatchPlan, common: CommonAttentionMetadata) -> AbstractContextManager[Any]:
        """Around the step's forward pass."""
        metadata: dict[str, Any] = {}
        for backend, builder in self.builders.items():
            metadata |= dict.fromkeys(self.layers_of[backend], builder.build(common))
        return set_forward_context(
            metadata,
            self.cached_layers,
            dp_metadata=DPMetadata.make(plan.num_tokens_padded_across_dp, plan.dp_rank, plan.num_tokens_padded),
            batch_plan=plan,
            slot_mapping=common.slot_mapping,
            is_dummy=plan.is_dummy,
            step_buffers=self.step_buffers,
            step=plan.step,
        )

    def _sample(
        self, inputs: StepInputs, metadata: SamplingMetadata, hidden_states: torch.Tensor, copies: HostCopies
    ) -> SamplerOutput:
        """One token for each request whose last token ran in this step, on its way to the host; the same on every TP
        rank."""
        num_sampled, rows = len(inputs.layout.sampling), inputs.logits_rows
        if rows is not None:
            hidden_states = hidden_states[rows]
        elif num_sampled < hidden_states.shape[0]:
            hidden_states = hidden_states[:num_sampled]
        logits = self.model.compute_logits(hidden_states)
        sampled = self.sampler(logits, metadata)
        tp = get_tp_group()
        if tp.world_size > 1:
            sampled = replace(sampled, sampled_token_ids=tp.broadcast(sampled.sampled_token_ids))
        self.last_sampled.put(inputs.sampled_rows, inputs.layout.rows_sampled, sampled.sampled_token_ids)
        if self.is_host:
            return sampled
        logprobs = sampled.logprobs_tensors
        return SamplerOutput(
            copies.add(sampled.sampled_token_ids),
            None if logprobs is None else LogprobsTensors(*map(copies.add, logprobs)),
            copies.add(sampled.largest),
            copies.add(sampled.undrawable),
        )

    def _score_prompts(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, hidden_states: torch.Tensor, copies: HostCopies
    ) -> dict[str, list[LogprobsTensors]]:
        """Log-probabilities of the prompt tokens that follow this step's prompt positions, where asked for, in pieces
        on their way to the host."""
        scored: dict[str, list[LogprobsTensors]] = {}
        for i, request in enumerate(scheduler_output.requests):
            num_logprobs = request.sampling_params.prompt_logprobs
            if num_logprobs is None:
                continue
            start, first = int(inputs.layout.starts[i]), scheduler_output.num_computed_tokens[i]
            end = min(first + scheduler_output.num_scheduled_tokens[i], request.num_prompt_tokens - 1)
            for begin in range(first, end, PROMPT_LOGPROB_ROWS):
                stop = min(begin + PROMPT_LOGPROB_ROWS, end)
                logits = self.model.compute_logits(hidden_states[start + begin - first : start + stop - first])
                targets = to_device(torch.tensor(request.prompt_token_ids[begin + 1 : stop + 1]), self.device)
                piece = self.sampler.gather_logprobs(logits, num_logprobs, targets)
                scored.setdefault(request.request_id, []).append(LogprobsTensors(*map(copies.add, piece)))
        return scored

    def _to_output(self, step: LaunchedStep, inputs: StepInputs) -> ModelRunnerOutput:
        """What came to the host, in the scheduler's order. Nothing is read that may belong to a later step."""
        requests, sampled, number = step.scheduler_output.requests, step.sampled, step.plan.step
        output = ModelRunnerOutput([[] for _ in requests])
        for request_id, pieces in step.prompt_logprobs.items():
            lists = [[x for part in column for x in part.tolist()] for column in zip(*pieces, strict=True)]
            output.prompt_logprobs[request_id] = LogprobsLists(*lists)
        if sampled is None:
            return output
        token_ids, sampling = sampled.sampled_token_ids.tolist(), inputs.layout.sampling
        for index, token_id in zip(sampling, token_ids, strict=True):
            output.sampled_token_ids[index] = [token_id]
        if sampled.logprobs_tensors is not None:
            columns = [tensor.tolist() for tensor in sampled.logprobs_tensors]
            for at, index in enumerate(sampling):
                if requests[index].sampling_params.logprobs is not None:
                    row = LogprobsLists(*([column[at]] for column in columns))
                    output.logprobs[requests[index].request_id] = row
        if sampled.undrawable is not None:
            for at in sampled.undrawable.nonzero().flatten().tolist():
                request_id = requests[sampling[at]].request_id
                output.undrawable[request_id] = step.chosen[at].why_undrawable()
                logger.error("step %d: request %s: %s", number, request_id, output.undrawable[request_id])
        nan_rows = sampled.nan_rows()
        if any(nan_rows):
            output.nan_req_ids = frozenset(requests[i].request_id for i in compress(sampling, nan_rows))
            logger.error("step %d: NaN logits for requests %s", number, sorted(output.nan_req_ids))
        return output
