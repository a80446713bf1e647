# SPDX-License-Identifier: Apache-2.0
"""What the largest step takes in its course, beside the weights and the caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm.forward_context import DPMetadata, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.sample.metadata import Penalties, SamplingMetadata, TokenEntries
from vllm.v1.sample.sampler import LOGPROB_ROWS
from vllm.v1.worker.batch_plan import BatchPlan
from vllm.v1.worker.dp_utils import coordinate_batch_across_dp

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PROMPT_LOGPROB_ROWS = 256
_SMALL_TOKENS, _SMALL_ROWS = 32, 4
# The experts' kernel keeps intermediate values of so many bytes, the other kernels far fewer.
_KERNEL_SCRATCH = 64 << 20


def largest_step_bytes(runner: GPUModelRunner) -> int:
    """Bytes that the largest step takes for a time, and those of its buffers where they count as free until written.

    A device runs that step. On CPU it would take as long as a prompt of that size, so a small one is measured and
    scaled: what a step makes grows no faster than its rows. Every rank calls this at the same time. The buffers that
    layers share are made here, so that none is left to be made in service.
    """
    config = runner.vllm_config
    num_tokens, num_reqs = runner.max_num_tokens, config.scheduler_config.max_num_seqs
    scored = min(num_tokens, PROMPT_LOGPROB_ROWS)
    layers = [layer for layer in runner.model.modules() if isinstance(layer, Attention)]
    each = [x.impl.workspace_bytes(num_tokens, config.model_config.max_model_len, x.dtype) for x in layers]
    attention = max(each, default=0)
    if runner.device.type != "cpu":
        return attention + sum(_peaks(runner, num_tokens, max(num_reqs, scored), num_reqs, scored))
    _peaks(runner, 1, 1, 1, 1)
    tokens, rows = min(num_tokens, _SMALL_TOKENS), min(num_tokens, _SMALL_ROWS)
    forward, head, sampler, scoring = _peaks(runner, tokens, rows, rows, rows)
    peak = forward * num_tokens // tokens
    peak += (head * max(num_reqs, scored) + sampler * num_reqs + scoring * min(scored, LOGPROB_ROWS)) // rows
    return peak + attention + runner.step_buffers.nbytes + runner.input_batch.nbytes + _KERNEL_SCRATCH


def _peaks(runner: GPUModelRunner, num_tokens: int, num_logits: int, num_reqs: int, num_scored: int) -> Sequence[int]:
    """The most that the model, its output head, the sampler and the scoring of prompts take, one after the other."""
    agreement = coordinate_batch_across_dp(num_tokens, step=-1, has_unfinished=False, pad_to_max=runner.pad_to_max)
    plan = BatchPlan.make(agreement, 1)
    measure, device = runner.platform.measure_peak, runner.device
    zeros = torch.zeros(plan.num_tokens_padded, dtype=torch.int64, device=device)
    across_dp = DPMetadata.make(plan.num_tokens_padded_across_dp, plan.dp_rank, plan.num_tokens_padded)
    with set_forward_context(
        None, dp_metadata=across_dp, batch_plan=plan, step_buffers=runner.step_buffers, step=plan.step
    ):
        with measure(device) as forward:
            hidden_states = runner.model(zeros, zeros)
        rows = zeros.new_zeros(num_logits)
        with measure(device) as head:
            logits = runner.model.compute_logits(hidden_states[rows])
        with measure(device) as sampler:
            runner.sampler(logits[:num_reqs], _all_options(runner, num_reqs))
        with measure(device) as scoring:
            runner.sampler.gather_logprobs(logits[:num_scored], runner.vllm_config.model_config.max_logprobs, rows)
    return [each.bytes for each in (forward, head, sampler, scoring)]


def _all_options(runner: GPUModelRunner, num_reqs: int) -> SamplingMetadata:
    """Every row sampled under every limit, and penalised for as many tokens as a request can have seen."""
    model, device = runner.vllm_config.model_config, runner.device
    vocab_size, real = model.vocab_size, runner.input_batch.sampling.real
    seen = min(model.max_model_len, vocab_size)
    each = torch.ones(num_reqs, device=device)
    entry = torch.ones(num_reqs * seen, device=device)
    at = torch.arange(num_reqs * seen, device=device)
    return SamplingMetadata(
        noise=each.to(real) / 2,
        temperature=each,
        greedy=each == 0,
        top_k=torch.full_like(each, max(vocab_size - 1, 1), dtype=torch.int64),
        max_top_k=max(vocab_size - 1, 1),
        top_p=each.to(real) / 2,
        top_p_alone=True,
        min_p=each / vocab_size,
        penalties=Penalties(TokenEntries(at // seen, at % seen), entry, entry.clone(), entry.clone(), entry.clone()),
    )
