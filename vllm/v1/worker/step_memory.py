# SPDX-License-Identifier: Apache-2.0
"""What the largest step takes in its course, beside the weights and the caches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.config import CUDAGraphMode
from vllm.distributed import get_dp_group
from vllm.kernels import ops
from vllm.kernels.padding import PAD_EXPERT
from vllm.kernels.reference_sampling import LOGPROB_ROWS
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.sample.metadata import AllowedTokens, Penalties, SamplingMetadata
from vllm.v1.transfers import is_host
from vllm.v1.worker.batch_plan import BatchPlan
from vllm.v1.worker.dp_utils import coordinate_batch_across_dp

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

PROMPT_LOGPROB_ROWS = 256
_SMALL_TOKENS, _SMALL_ROWS = 32, 4
# The experts' kernel keeps intermediate values of so many bytes, the other kernels far fewer.
_KERNEL_SCRATCH = 64 << 20
_GRAPH_OVERHEAD = 8 << 20  # of one size


def largest_step_bytes(runner: GPUModelRunner) -> int:
    """Bytes that the largest step takes for a time, and those of its buffers where they count as free until written.

    A device runs that step: a prompt in the longest context, and as many requests in it as may decode; and those that
    take each form of its kernels, so that none is left to be compiled in service. On CPU it would take as long as a
    prompt of that size, so a small one is measured and scaled: what a step makes grows no faster than its rows, and
    attention says what it takes in a long context. Every rank calls this at the same time. The buffers that layers
    share are made here, too.
    """
    config = runner.vllm_config
    num_tokens, num_reqs = runner.max_num_tokens, config.scheduler_config.max_num_seqs
    scored, context = min(num_tokens, PROMPT_LOGPROB_ROWS), config.model_config.max_model_len
    with _caches(runner):
        if not is_host(runner.device):
            began, before = time.monotonic(), ops.num_compiled()
            decodes = min(num_tokens, num_reqs)
            steps = {(1, 1, context), (decodes, decodes, context)}
            steps |= set(ops.paged_attention_forms(runner.device, num_tokens, num_reqs, context))
            steps |= {(T, 1, context) for T in ops.quantized_linear_forms(runner.device, num_tokens)}
            models = {step: _model_peak(runner, *step) for step in sorted(steps)}
            runner.graph_bytes = _graph_bytes(runner, models[decodes, decodes, context] // decodes)
            _run_experts(runner, num_tokens)
            forward, *others = _peaks(runner, num_tokens, max(num_reqs, scored), num_reqs, scored, context)
            logger.info(
                "%d kinds of steps ran once in %.1f s; Triton compiled %d kernels",
                len(steps) + 1, time.monotonic() - began, ops.num_compiled() - before,
            )  # fmt: skip
            return max(forward, *models.values()) + sum(others) + runner.graph_bytes
        _peaks(runner, 1, 1, 1, 1)
        tokens, rows = min(num_tokens, _SMALL_TOKENS), min(num_tokens, _SMALL_ROWS)
        forward, head, sampler, scoring = _peaks(runner, tokens, rows, rows, rows)
    runner.step_buffers.renew()
    layers: list[Any] = [layer for layer in runner.model.modules() if hasattr(layer, "workspace_bytes")]
    attention = max([layer.workspace_bytes(num_tokens, context) for layer in layers], default=0)
    peak = forward * num_tokens // tokens
    peak += (head * max(num_reqs, scored) + sampler * num_reqs + scoring * min(scored, LOGPROB_ROWS)) // rows
    return peak + attention + runner.step_buffers.nbytes + runner.input_batch.nbytes + _KERNEL_SCRATCH


def _graph_bytes(runner: GPUModelRunner, bytes_of_row: int) -> int:
    """What captured steps are given room for beside the largest step: they keep their memory while others run.

    All sizes share one pool, which the largest, captured first, takes; its rows were just measured in a step of decodes
    that ran eagerly. What the driver keeps of a graph (its nodes and their arguments) cannot be asked beforehand: 8 MiB
    for each size. The log of the capture says what was taken, and warns where it is more.
    """
    if runner.graph_mode is CUDAGraphMode.NONE or not (sizes := runner.graphs.wanted_sizes()):
        return 0
    return max(sizes) * bytes_of_row + len(sizes) * _GRAPH_OVERHEAD


@contextmanager
def _caches(runner: GPUModelRunner) -> Iterator[None]:
    """The smallest caches that a step can run on, unless there are caches: what their sizes are is not known before."""
    if hasattr(runner, "kv_cache_config"):
        yield
        return
    num_slots = 2 * any(isinstance(spec, MambaSpec) for spec in runner.get_kv_cache_specs().values())
    with torch.device(runner.device):
        runner.initialize_kv_cache(KVCacheConfig(2, runner.vllm_config.cache_config.block_size, num_slots))
    yield
    runner.release_kv_cache()
    del runner.kv_cache_config


def _prepare(
    runner: GPUModelRunner, num_tokens: int, num_reqs: int, context: int
) -> tuple[AbstractContextManager[Any], torch.Tensor]:
    """A step of ``num_reqs`` requests, each at the end of ``context`` tokens at least: to be run in that context, with
    these ids and positions. All keep what they keep in one block and one state slot, where nothing is of worth yet."""
    real = min(num_tokens, num_reqs * runner.vllm_config.model_config.max_model_len)
    agreement = coordinate_batch_across_dp(
        real, step=-1, has_unfinished=False, num_tokens_padded=num_tokens, pad_to_max=runner.pad_to_max
    )
    plan, block_size = BatchPlan.make(agreement, num_reqs), runner.kv_cache_config.block_size
    scheduled = real // num_reqs + (np.arange(num_reqs) < real % num_reqs)
    block_table = np.ones((1, runner.input_batch.block_table.max_blocks), dtype=np.int32)
    with runner.buffers.filling():
        common = runner.fill_metadata(
            plan,
            scheduled,
            np.maximum(scheduled, context),
            np.zeros(num_reqs, dtype=np.int64),
            block_table,
            block_size + np.arange(real) % block_size,
            np.ones(num_reqs, dtype=np.int32),
        )
    runner.stream.wait()
    zeros = torch.zeros(plan.num_tokens_padded, dtype=torch.int64, device=runner.device)
    return runner.forward_context(plan, common), zeros


def _model_peak(runner: GPUModelRunner, num_tokens: int, num_reqs: int, context: int) -> int:
    """The most that the model takes where the requests run so many tokens in all."""
    forward, zeros = _prepare(runner, num_tokens, num_reqs, context)
    with forward, runner.platform.measure_peak(runner.device) as peak:
        runner.model(zeros, zeros)
    return peak.bytes


def _run_experts(runner: GPUModelRunner, num_tokens: int) -> None:
    """Each form of the experts' kernels, on rows that choose none: what a rank receives in a step may be the rows of
    one token, or of all ranks' largest steps, which no step here is."""
    layers = {
        (layer.local_num_experts, layer.router.top_k, layer.hidden_size, layer.local_intermediate): layer
        for layer in runner.model.modules()
        if isinstance(layer, FusedMoE)
    }
    for (E, S, D, _), layer in layers.items():
        received = num_tokens * get_dp_group().world_size
        for T in ops.fused_experts_forms(runner.device, received, S, E, layer.dtype) if E else ():
            x = torch.zeros(T, D, dtype=layer.dtype, device=runner.device)
            weights, ids = (torch.full((T, S), value, device=runner.device) for value in (0.0, PAD_EXPERT))
            layer.experts(x, weights, ids.to(torch.int32))


def _peaks(
    runner: GPUModelRunner, num_tokens: int, num_logits: int, num_reqs: int, num_scored: int, context: int = 1
) -> Sequence[int]:
    """The most that the model, its output head, the sampler and the scoring of prompts take, one after the other."""
    measure, device, config = runner.platform.measure_peak, runner.device, runner.vllm_config
    num_prompts = min(-(-num_tokens // config.model_config.max_model_len), config.scheduler_config.max_num_seqs)
    forward_context, zeros = _prepare(runner, num_tokens, num_prompts, context)
    with forward_context:
        with measure(device) as forward:
            hidden_states = runner.model(zeros, zeros)
        rows = zeros.new_zeros(num_logits)
        with measure(device) as head:
            logits = runner.model.compute_logits(hidden_states[rows])
        with measure(device) as sampler:
            # With penalties and without: the logits are of other types.
            for options in _all_options(runner, num_reqs):
                runner.sampler(logits[:num_reqs], options)
        with measure(device) as scoring:
            runner.sampler.gather_logprobs(logits[:num_scored], config.model_config.max_logprobs, rows)
    return [each.bytes for each in (forward, head, sampler, scoring)]


def _all_options(runner: GPUModelRunner, num_reqs: int) -> Iterator[SamplingMetadata]:
    """Every row sampled under every limit, and then also penalised for as many tokens as a request can have seen."""
    model, device = runner.vllm_config.model_config, runner.device
    vocab_size = model.vocab_size
    seen = min(model.max_model_len, vocab_size)
    each = torch.ones(num_reqs, device=device)
    starts, tokens = (torch.arange(n, device=device) for n in (num_reqs + 1, num_reqs * seen))
    limited = SamplingMetadata(
        temperature=each,
        seeds=torch.zeros_like(each, dtype=torch.int64),
        positions=torch.zeros_like(each, dtype=torch.int64),
        top_k=torch.full_like(each, max(vocab_size - 1, 1), dtype=torch.int64),
        top_p=each / 2,
        log_min_p=-20 * each,
        max_num_logprobs=0,
    )
    yield limited
    penalties = Penalties(
        (starts * seen).int(), tokens % seen, torch.ones_like(tokens, dtype=each.dtype), each, each, each
    )
    rows = torch.arange(num_reqs, device=device)
    grammar = AllowedTokens(rows, torch.full((num_reqs, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device))
    yield replace(limited, penalties=penalties, grammar=grammar)
