# SPDX-License-Identifier: Apache-2.0
"""``VLLM_DEBUG_NAN``: where the first NaN or Inf of a run is, whose row it is, and since which step.

Checks before and after attention in every decoder layer, after its feed-forward, at the logits, and of the cache slots
that the step's rows are about to be written to. Each kind prints once on each rank, when it happens:

    1       print, go on
    raise   print, end the step, then stop every rank with :class:`NanError`
    abort   print, end the requests that own a bad row with finish reason "error"; the others go on

Rows are split at the true count, ``query_start_loc[-1]``, whatever ``num_actual_tokens`` says. Profiling runs and
dummies print nothing; the first dummy that held a NaN is told in the next line that is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm import envs, forward_context
from vllm.distributed import get_dp_group, get_tp_group, get_world_group
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

_MODES = {"": "", "0": "", "1": "print", "raise": "raise", "abort": "abort"}
_SHOWN = 10


class NanError(RuntimeError):
    """A NaN, an Inf or a wrong cache slot was found; the message is the line that was printed."""


def install_nan_trace(model: nn.Module) -> NanTrace | None:
    """Hook the checks into ``model`` if ``VLLM_DEBUG_NAN`` asks for them; None, and no hook, if not.

    Raises:
        ValueError: the variable is none of 0, 1, raise and abort.
    """
    value = envs.VLLM_DEBUG_NAN.strip().lower()
    if value not in _MODES:
        raise ValueError(f"VLLM_DEBUG_NAN={value!r} is unknown; use 0, 1, raise or abort")
    return NanTrace(model, _MODES[value]) if _MODES[value] else None


def stale_slots(metadata: Any, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose slot is not the one that block table and position say, and the right slots [T], -1 for padding."""
    starts, seq_lens = metadata.query_start_loc_cpu.long(), metadata.seq_lens_cpu.long()
    request = torch.arange(len(seq_lens)).repeat_interleave(starts.diff())
    positions = torch.arange(len(request)) + (seq_lens - starts[1:])[request]
    slots = metadata.slot_mapping.cpu()
    right = torch.full_like(slots, -1)
    blocks = metadata.block_table.cpu()[request, positions // block_size].long()
    right[: len(request)] = blocks * block_size + positions % block_size
    return (slots != right).nonzero().flatten(), right


class NanTrace:
    """The checks of one rank. ``begin_step`` and ``end_step`` are called around every step, on all ranks."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.mode = mode
        self.printed: set[str] = set()
        self.dummy = ""  # the first event of a dummy that no line has told yet
        self.requests: Sequence[Request] = ()
        self.bad_requests: set[str] = set()
        self.finding = ""
        self.positions = self.logits = torch.empty(0)
        self.clean_input = True
        self.first_attention: int | None = None
        for name, layer in model.named_modules():
            if not (hasattr(layer, "self_attn") and hasattr(layer, "mlp")):
                continue
            index = int(name.rsplit(".", 1)[1])
            cached = next(m for m in layer.self_attn.modules() if hasattr(m, "get_kv_cache_spec"))
            if self.first_attention is None and hasattr(cached, "kv_cache"):
                self.first_attention = index
            feed_forward = "MoE" if any(isinstance(m, FusedMoE) for m in layer.mlp.modules()) else "MLP"
            layer.self_attn.register_forward_pre_hook(partial(self._before_attention, index, cached))
            layer.self_attn.register_forward_hook(partial(self._after_attention, index, cached))
            layer.mlp.register_forward_hook(partial(self._after_mlp, index, feed_forward))
        lm_head: Any = model.get_submodule("lm_head")
        lm_head.register_forward_hook(self._keep_logits)

    def begin_step(self, requests: Sequence[Request]) -> None:
        self.requests, self.bad_requests, self.finding = requests, set(), ""
        self.logits = torch.empty(0)

    def end_step(self, output: ModelRunnerOutput) -> None:
        """Tell NaN logits, then let all ranks of a group take the same decision, whoever of them saw the NaN.

        Raises:
            NanError: in mode ``raise``, on every rank, where any rank found something in this step.
        """
        if output.nan_req_ids:
            self._tell_logits(output)
        if self.mode == "raise":
            found = [finding for finding in get_world_group().all_gather_object(self.finding) if finding]
            if found:
                raise NanError(found[0])
        elif self.mode == "abort":
            bad = get_tp_group().all_gather_object(sorted(self.bad_requests))
            output.nan_req_ids = output.nan_req_ids.union(*bad)

    def _before_attention(self, layer_idx: int, cached: Any, _: nn.Module, args: tuple[Any, ...]) -> None:
        context = forward_context.get_forward_context()
        if context.attn_metadata is None:
            return
        self.positions, hidden_states = args
        self.clean_input = not self._check("PRE_ATTN", "BEFORE attention", layer_idx, hidden_states)
        if layer_idx == self.first_attention:
            self._check_metadata(layer_idx, cached, hidden_states, context)

    def _after_attention(self, layer_idx: int, cached: Any, _: nn.Module, __: Any, hidden_states: torch.Tensor) -> None:
        source = cached if self.clean_input else None
        self._check("POST_ATTN", "AFTER attention", layer_idx, hidden_states, source)

    def _after_mlp(self, layer_idx: int, what: str, _: nn.Module, __: Any, hidden_states: torch.Tensor) -> None:
        self._check("POST_MOE", f"AFTER {what}", layer_idx, hidden_states)

    def _keep_logits(self, _: nn.Module, __: Any, logits: torch.Tensor) -> None:
        self.logits = logits

    def _wanted(self, kind: str) -> bool:
        return self.mode == "abort" or kind not in self.printed

    def _check(self, kind: str, where: str, layer_idx: int, x: torch.Tensor, source: Any = None) -> bool:
        """Whether x [T, hidden] holds a NaN or Inf; tells where. ``source``: the layer whose input was clean."""
        context = forward_context.get_forward_context()
        if context.attn_metadata is None or not (self._wanted(kind) or kind == "PRE_ATTN"):
            return False
        bad = ~x.isfinite()
        if not bool(bad.any()):
            return False
        if not self._wanted(kind):
            return True
        if context.is_dummy:
            self.dummy = self.dummy or f"{kind} layer_idx={layer_idx} step={forward_context.get_place().step}"
            return True
        rows = bad.any(1).nonzero().flatten().tolist()
        metadata = next(iter(context.attn_metadata.values()))
        real = int(metadata.query_start_loc_cpu[-1])
        fields = f"layer_idx={layer_idx} NaN/Inf detected {where}! {_counts(x)}"
        if kind != "PRE_ATTN":
            elements = bad.sum(1)
            real_rows = sum(row < real for row in rows)
            fields += (
                f" num_actual_tokens={real} actual_nan_rows={real_rows} actual_nan_elems={int(elements[:real].sum())}"
                f" padding_nan_rows={len(rows) - real_rows} padding_nan_elems={int(elements[real:].sum())}"
            )
        self._tell(f"NAN_CHECK_{kind}", kind, fields + _rows(rows), rows, metadata, source)
        return True

    def _tell_logits(self, output: ModelRunnerOutput) -> None:
        """The sampler marks requests whose logits are NaN; these are the rows [R, vocab] that it sampled from."""
        bad = [i for i, request in enumerate(self.requests) if request.request_id in output.nan_req_ids]
        assert len(self.logits) == sum(map(bool, output.sampled_token_ids)), (
            f"{len(self.logits)} rows of logits for {output.sampled_token_ids}"
        )
        owners = [
            f"request {self.requests[i].request_id!r} position {len(self.requests[i].all_token_ids) - 1} (real)"
            for i in bad[:_SHOWN]
        ]
        fields = _counts(self.logits) + _rows((~self.logits.isfinite()).any(1).nonzero().flatten().tolist())
        line = f"[NAN_CHECK_LOGITS] ERROR {_rank()} NaN/Inf detected IN logits! {fields} owners=[{', '.join(owners)}]"
        self._print("LOGITS", line)

    def _check_metadata(self, layer_idx: int, cached: Any, hidden_states: torch.Tensor, context: Any) -> None:
        if context.is_dummy:
            return
        metadata = context.attn_metadata[cached.layer_name]
        starts = metadata.query_start_loc_cpu.tolist()
        real, shape = starts[-1], list(hidden_states.shape)
        fields = (
            f"layer_idx={layer_idx} num_actual_tokens={metadata.num_actual_tokens} "
            f"seq_lens={metadata.seq_lens_cpu.tolist()} query_start_loc={starts} hidden_shape={shape}"
        )
        if "ATTN_MASK_CHECK" not in self.printed:
            self.printed.add("ATTN_MASK_CHECK")
            print(f"[ATTN_MASK_CHECK] {_rank()} {fields}", flush=True)
        if metadata.num_actual_tokens != real:
            fields += f" num_actual_tokens is not query_start_loc[-1]: rows from {real} on belong to no request"
            self._print("COUNT", f"[ATTN_MASK_CHECK] ERROR {_rank()} {fields}")
        if self._wanted("SLOTS"):
            rows, right = stale_slots(metadata, cached.kv_cache[0].shape[2])
            if len(rows):
                fields += f" stale slot_mapping: slots={metadata.slot_mapping[rows][:_SHOWN].tolist()}..."
                fields += f" expected={right[rows][:_SHOWN].tolist()}... row_indices={rows[:_SHOWN].tolist()}..."
                fields += f" total_stale_rows={len(rows)}"
                self._tell("ATTN_MASK_CHECK", "SLOTS", fields, rows.tolist(), metadata, None)

    def _tell(self, tag: str, kind: str, fields: str, rows: list[int], metadata: Any, source: Any) -> None:
        """Print the line with the rows' owners, and remember the requests among them."""
        starts = metadata.query_start_loc_cpu
        real = int(starts[-1])
        of_row = [int(torch.searchsorted(starts, row, right=True)) - 1 for row in rows if row < real]
        self.bad_requests |= {self.requests[i].request_id for i in of_row}
        if kind in self.printed:
            return
        owners = [
            f"{row}: request {self.requests[i].request_id!r} position {int(self.positions[row])} (real)"
            for row, i in zip(rows[:_SHOWN], of_row, strict=False)
        ]
        owners += [f"{row}: pad" for row in rows[:_SHOWN] if row >= real]
        line = f"[{tag}] ERROR {_rank()} {fields} owners=[{', '.join(owners)}]"
        if source is not None and of_row:
            line += _memory(source, forward_context.get_forward_context().attn_metadata, of_row[0])
        self._print(kind, line)

    def _print(self, kind: str, line: str) -> None:
        self.finding = self.finding or line
        if kind in self.printed:
            return
        self.printed.add(kind)
        line += f" step={forward_context.get_place().step} tp_rank={get_tp_group().rank_in_group}"
        if self.dummy:
            line += f" first_dummy_with_nan=[{self.dummy}]"
            self.dummy = ""
        print(line, flush=True)


def _rank() -> str:
    return f"dp_rank={get_dp_group().rank_in_group}"


def _counts(x: torch.Tensor) -> str:
    return f"nan_count={int(x.isnan().sum())} inf_count={int(x.isinf().sum())} shape={list(x.shape)}"


def _rows(rows: list[int]) -> str:
    return f" nan_row_indices={rows[:_SHOWN]}... total_nan_rows={len(rows)}"


def _memory(layer: Any, attn_metadata: Any, request: int) -> str:
    """What in the memory of ``layer`` is NaN for the request: its state slot, or the blocks that hold its tokens."""
    metadata = attn_metadata[layer.layer_name]
    if not hasattr(layer, "kv_cache"):
        slot = int(metadata.state_indices[request])
        bad = [name for name in ("conv_state", "recurrent_state") if not getattr(layer, name)[slot].isfinite().all()]
        return f" input was clean; state_slot={slot} nan_in={bad}"
    length, block_size = int(metadata.seq_lens_cpu[request]), layer.kv_cache[0].shape[2]
    blocks = metadata.block_table[request, : -(-length // block_size)].long()
    held = (cache[blocks].float() for cache in layer.kv_cache)
    bad_slots = sum((~x.isfinite()).any(3).any(1).flatten()[:length].long() for x in held)
    positions = bad_slots.nonzero().flatten()
    named = blocks[positions // block_size].unique().tolist()
    return f" input was clean; kv_blocks={named} nan_at_positions={positions[:_SHOWN].tolist()}..."
