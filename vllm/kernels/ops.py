# SPDX-License-Identifier: Apache-2.0
"""The operators: what each promises, whatever implementation ``table`` has chosen for the device of its first tensor.

Shape letters: T tokens (rows), N output features, K input features, H query heads, J key/value heads, D head size or
model width, R requests, E experts, S experts of a token, I intermediate size of an expert, V tokens of the vocabulary.

A new operator is its contract here, its twin in ``reference``, its row in ``table``, and what runs it faster.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from vllm.compilation import recording
from vllm.kernels import checks, memory, quantized, weights
from vllm.kernels.quantized import QuantizedWeight
from vllm.kernels.table import ATTENTION, choose, first_installed, run_another
from vllm.kernels.weights import GDNWeights, PackedExperts, PackedWeight


def _run(operator: str, x: Tensor, *args: Any) -> Any:
    if (recorder := recording.active) is not None and not recorder.running:
        return recorder.operator(operator, _run, (operator, x, *args))
    choice = choose("cpu" if x.is_cpu else x.device.type)[operator]
    try:
        return choice.function(x, *args)
    except NotImplementedError as refusal:
        return run_another(choice, refusal, x, *args)


@functools.cache
def _packer(kind: str) -> Any:
    """The implementation that packs weights of this kind, not "plain"."""
    return importlib.import_module(f"vllm.kernels.{'cpu' if kind == 'panels' else kind}")


def _run_packed(operator: str, packed: PackedWeight | PackedExperts | QuantizedWeight, x: Tensor, *args: Any) -> Any:
    """What is packed is read by the implementation that packed it, whatever has been chosen since; what that refuses,
    by others, from plain weights again."""
    quantised = [arg for arg in args if isinstance(arg, QuantizedWeight)]
    packed = next((weight for weight in quantised if weight.kind != "plain"), packed)
    if packed.kind == "plain":
        return _run(operator, x, *args)
    if (recorder := recording.active) is not None and not recorder.running:
        return recorder.operator(operator, _run_packed, (operator, packed, x, *args))
    module = _packer(packed.kind)
    unpack = getattr(module, "unpack_quantized_weight", None) if isinstance(packed, QuantizedWeight) else None
    if unpack is None:
        return getattr(module, operator)(x, *args)
    refused = None
    if hasattr(module, operator):
        try:
            return getattr(module, operator)(x, *args)
        except NotImplementedError as refusal:
            refused = refusal
    plain = [unpack(arg) if isinstance(arg, QuantizedWeight) else arg for arg in args]
    choice = choose("cpu" if x.is_cpu else x.device.type)[operator]
    if refused is not None and choice.module is module:
        return run_another(choice, refused, x, *plain)
    return _run(operator, x, *plain)


def _own(name: str, operator: str, device_type: str, plain: Any) -> Any:
    """What the implementation of ``operator`` has under ``name``, else what ``plain`` has."""
    return getattr(choose(device_type)[operator].module, name, None) or getattr(plain, name)


def _reader(packed: PackedWeight | PackedExperts) -> Any:
    return weights if packed.kind == "plain" else _packer(packed.kind)


def linear(
    x_TK: Tensor, packed: PackedWeight | QuantizedWeight, bias_N: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias`` -> [T, N], by ``quantized_linear`` where the weight is quantised.

    Args:
        x_TK: [T, K] of the weight's dtype, T from 0; its rows may be further apart than K.
        bias_N: [N] of the weight's dtype.
        out: [T, N], rows contiguous, of the weight's dtype or float32 (then the sums are not rounded).
    """
    operator = "quantized_linear" if isinstance(packed, QuantizedWeight) else "linear"
    return _run_packed(operator, packed, x_TK, packed, bias_N, out)


def quantized_linear(
    x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``linear`` with a weight as ``pack_quantized_weight`` gives it: in effect with the matrix that it means, in
    float32 with one rounding, and with rounded inputs where ``weight.activations`` says so.

    A weight that is one of bfloat16 inputs may be multiplied on coarser grids where that moves no result by more than
    2 ** -6 of the row's largest; one of float32 inputs is exact to float32's roundings.
    """
    return _run_packed("quantized_linear", weight, x_TK, weight, bias_N, out)


def embedding(
    ids_T: Tensor, packed: PackedWeight | QuantizedWeight, vocab_range: tuple[int, int] | None = None
) -> Tensor:
    """Rows ``ids`` (int64 [T]) of a packed weight -> [T, K]: tied embeddings need no second copy.

    Without ``vocab_range`` each id is in [0, N). With it the weight's rows are those of the ids [first, last),
    at most N, and any other id gives a row that is exactly 0: ranks that share a vocabulary add up their results.
    """
    operator = "quantized_embedding" if isinstance(packed, QuantizedWeight) else "embedding"
    return _run_packed(operator, packed, ids_T, packed, vocab_range)


def quantized_embedding(ids_T: Tensor, weight: QuantizedWeight, vocab_range: tuple[int, int] | None = None) -> Tensor:
    """``embedding`` with a weight as ``pack_quantized_weight`` gives it for ``exact``: rows of what it means, rounded
    once to its dtype."""
    return _run_packed("quantized_embedding", weight, ids_T, weight, vocab_range)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, with the roundings of transformers.

    Args:
        x: [T, D], or [T, H, D] as a view into wider rows; the last dimension contiguous.
        weight_D: [D] of x's dtype: applied to the normalised value after that is rounded (Llama). float32 beside a
            narrower x: applied before the one rounding (the ``1 + weight`` of Gemma and Qwen3.5, folded by the caller).
        out: of x's shape and dtype, may be x itself.
    """
    return _run("rms_norm", x, weight_D, eps, out)


def fused_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place, rounded to its dtype; returns (rms_norm(residual), residual), both [T, D].

    ``out`` may be x itself.
    """
    return _run("fused_add_rms_norm", x_TD, residual_TD, weight_D, eps, out)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """[T, 2 * D] = [gate, up] -> ``silu(gate) * up`` [T, D]; rows may be strided."""
    return _run("silu_and_mul", x, out)


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """As ``silu_and_mul`` with ``gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3)))`` in silu's place."""
    return _run("gelu_tanh_and_mul", x, out)


def sigmoid_gate(x: Tensor, gate: Tensor) -> None:
    """``x *= sigmoid(gate)`` in place: the sigmoid in float32 and rounded to x's dtype, as is the product.

    x: [T, D] or [T, H, D], the last dimension contiguous; gate: the same, or with one number in the place of D.
    """
    _run("sigmoid_gate", x, gate)


def rotary_embedding(
    positions_T: Tensor, q_THD: Tensor, k_TJD: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    """Rotates q and k in place, in float32 with one rounding.

    Args:
        positions_T: int64 [T], each in [0, P).
        q_THD, k_TJD: [T, H, D] and [T, J, D], may be views into a fused row; the last dimension contiguous.
        cos_sin_cache: float32 [P, rot_dim], cosines of the rot_dim / 2 angles, then sines. rot_dim <= D is even; the
            elements of a head past rot_dim stay as they are.
        interleaved: angle i turns the elements 2 i and 2 i + 1 (GPT-J, latent attention), not i and i + rot_dim / 2
            (NeoX, Llama).
    """
    _run("rotary_embedding", positions_T, q_THD, k_TJD, cos_sin_cache, interleaved)


def reshape_and_cache(
    k_TJD: Tensor,
    v_TJD: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping_T: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes token t to slot ``slot_mapping[t]`` = block * block_size + offset; a token with slot -1 is skipped.

    Args:
        k_TJD, v_TJD: [T, J, D], may be views into a fused row; the last dimension contiguous.
        key_cache, value_cache: [num_blocks, J, block_size, D] of the same dtype, or float8_e4m3fn; the last dimension
            contiguous. v and its cache are None where the values are part of the keys (latent attention).
        slot_mapping_T: int64 [T].
        k_scale, v_scale: a float8 cache holds ``x / scale``, to the nearest and of two to the even one, what is beyond
            ±448 (infinity too) as ±448, and NaN as NaN. Unused by others.
    """
    _run("reshape_and_cache", k_TJD, v_TJD, key_cache, value_cache, slot_mapping_T, k_scale, v_scale)


def zero_padding_rows(x: Tensor, slot_mapping_T: Tensor) -> None:
    """Sets the rows of x [T, ...] with a negative slot in ``slot_mapping`` (int64 [T]) to exactly 0, in place, and
    touches no other; a row is contiguous."""
    _run("zero_padding_rows", x, slot_mapping_T)


def paged_attention(
    q_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out_THD: Tensor,
    sliding_window: int = 0,
    num_reqs: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Causal grouped-query attention over the paged cache, prefill and decode mixed; the new keys are in the cache.

    Query i of request r has position ``seq_lens[r] - query_len + i`` and sees the keys at ``(position - sliding_window,
    position]``, or ``[0, position]`` when sliding_window is 0. A slot outside those keys is never part of a sum, so it
    may hold NaN. Rows [0, query_start_loc[R]) are written, except those of a request with seq_len 0; the rows from
    query_start_loc[R] on are set to 0.

    Args:
        q_THD, out_THD: [T, H, D], may be views into wider rows; the last dimension contiguous.
        key_cache, value_cache: [num_blocks, J, block_size, D] of q's dtype, or float8_e4m3fn; H a multiple of J, the
            last dimension contiguous. The values, and with them ``out``, may have a head size of their own, and may be
            a view of the keys.
        block_table: int32 [>= R, max_blocks].
        query_start_loc: int32 [>= R + 1], rising from 0; seq_lens: int32 [>= R].
        num_reqs: R; by default ``query_start_loc.shape[0] - 1``.
        sinks: [H], the logit of one more column of each head's softmax, which has a weight and no value.
        soft_cap: where it is not 0, a score s becomes ``soft_cap * tanh(s / soft_cap)``; the sinks do not.
        query_start_loc_cpu, seq_lens_cpu: the same on the host. Some kernels take sizes from there, and would wait for
            the device without them; none may, where a step is to be captured.
        k_scale, v_scale: a key is what its cache holds times ``k_scale``, a value so with ``v_scale``.
    """
    _run(
        "paged_attention", q_THD, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, out_THD,
        sliding_window, num_reqs, sinks, soft_cap, query_start_loc_cpu, seq_lens_cpu, k_scale, v_scale,
    )  # fmt: skip


def fused_experts(
    x_TD: Tensor,
    w13: PackedExperts | QuantizedWeight,
    w2: PackedExperts | QuantizedWeight,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Gated experts: ``sum over s of weight[t, s] * (w2[e] h + b2[e])``, h = act(gate, up), [gate; up] = w13[e] x[t] +
    b13[e], e = id[t, s].

    act is ``silu(gate) * up`` (SwiGLU), or for ``activation="swigluoai"`` (gpt-oss), with gate at most 7 and up within
    -7 and 7, ``gate * sigmoid(1.702 * gate) * (up + 1)``.

    A slot with id -1 is skipped: its weight is not read and may be NaN; a row with no other slots is exactly 0, and
    nothing its x holds reaches another row. The sum over slots is in float32, in the order of the slots.

    Args:
        x_TD: [T, D] of the weights' dtype, rows contiguous.
        w13: ``pack_expert_weights(w [E, 2 * I, D], gated=True)``; w2: ``pack_expert_weights(w [E, D, I])``. Or both
            quantised: then ``quantized_experts`` runs, which is to this what ``quantized_linear`` is to ``linear``.
        topk_ids_TS: int32 or int64 [T, S], each in [-1, E); topk_weights_TS: float32 [T, S].
        out: [T, D] of x's dtype; may be x itself.
        b13, b2: float32 [E, 2 * I] and [E, D], contiguous.
    """
    operator = "quantized_experts" if isinstance(w13, QuantizedWeight) else "fused_experts"
    return _run_packed(operator, w13, x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out, b13, b2, activation)


def quantized_experts(
    x_TD: Tensor,
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    topk_ids_TS: Tensor,
    topk_weights_TS: Tensor,
    out: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """``fused_experts`` with weights as ``pack_quantized_weight`` gives them, each product as ``quantized_linear``'s:
    where ``activations`` says so, a row of x and a row of ``silu(gate) * up`` are rounded each to a grid of its own."""
    return _run_packed(
        "quantized_experts", w13, x_TD, w13, w2, topk_ids_TS, topk_weights_TS, out, b13, b2, activation
    )  # fmt: skip


def pack_linear_weight(weight_NK: Tensor, into: PackedWeight | None = None) -> PackedWeight:
    """Packs a weight [N, K] (float32, bfloat16, float16; rows contiguous). The original may be freed afterwards.

    ``into``: a packed weight of the same shape and dtype whose memory the new one takes.
    """
    return _own("pack_linear_weight", "linear", weight_NK.device.type, weights)(weight_NK, into)


def unpack_linear_weight(packed: PackedWeight) -> Tensor:
    """The weight [N, K] that was packed, bit for bit."""
    return _reader(packed).unpack_linear_weight(packed)


def pack_quantized_weight(weight: QuantizedWeight, exact: bool = False) -> QuantizedWeight:
    """A plain weight, [N, K] or of experts [E, N, K], as the implementation that multiplies with it reads it; the
    original may be freed afterwards. The same object where that implementation reads plain ones. ``exact``: its rows
    are wanted too, by ``embedding``, so its codes become no others, even where products would be faster."""
    operator = "quantized_linear" if weight.codes.dim() == 2 else "quantized_experts"
    own = _own("pack_quantized_weight", operator, weight.codes.device.type, quantized)
    return own(weight, exact)


def empty_experts(E: int, N: int, K: int, dtype: torch.dtype, gated: bool = False) -> PackedExperts:
    """Room on the default device for experts' weights that ``repack_expert_weight`` brings; contents undefined."""
    device_type = torch.get_default_device().type
    return _own("empty_experts", "fused_experts", device_type, weights)(E, N, K, dtype, gated)


def pack_expert_weights(weight_ENK: Tensor, gated: bool = False) -> PackedExperts:
    """Packs the experts' weights [E, N, K]; ``gated=True`` for w13, whose N = 2 * I is [gate; up].

    "plain", and not copied, where the chosen implementation wants no order of its own in memory.
    """
    return _own("pack_expert_weights", "fused_experts", weight_ENK.device.type, weights)(weight_ENK, gated)


def repack_expert_weight(packed: PackedExperts, expert: int, weight_NK: Tensor, part: int = 0) -> None:
    """Put the weight of one expert, of a gated one its gate (``part`` 0) or up (1) half, in its place."""
    _reader(packed).repack_expert_weight(packed, expert, weight_NK, part)


def topk_softmax(
    router_logits_TE: Tensor, top_k: int, renormalize: bool, slot_mapping_T: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in fp32, then the ``top_k`` largest (Shazeer et al. 2017; Jiang et al. 2024).

    router_logits [T, E] → weights [T, top_k] fp32, largest first, times ``scale`` at the end; ids [T, top_k] int32.
    Which of equal experts is taken is the implementation's: the C++ and Triton's take the lowest, ``torch.topk`` any,
    always the same. A row with a negative slot in ``slot_mapping`` (int64 [T]) is padding: id -1 and weight 0, whatever
    its logits hold. A NaN there would make top-k return one expert many times; in a real row it shows in the weights.
    """
    return _run("topk_softmax", router_logits_TE, top_k, renormalize, slot_mapping_T, scale)


def topk_sigmoid(
    router_logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    bias_E: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As ``topk_softmax`` with each expert's own sigmoid in fp32; ``renormalize`` divides by the sum + 1e-20.

    ``bias_E`` [E] is added for the choice and its order, not to the weights (DeepSeek-AI 2024, arXiv:2412.19437).
    """
    return _run("topk_sigmoid", router_logits_TE, top_k, renormalize, slot_mapping_T, bias_E, scale)


def grouped_topk(
    router_logits_TE: Tensor,
    top_k: int,
    renormalize: bool,
    slot_mapping_T: Tensor,
    num_groups: int,
    topk_groups: int,
    group_top: int,
    sigmoid: bool,
    bias_E: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As ``topk_sigmoid``, or without ``sigmoid`` as ``topk_softmax``, from the best of ``num_groups`` equal groups of
    neighbouring experts alone (DeepSeek-AI 2024, arXiv:2405.04434): the ``topk_groups`` whose ``group_top`` best
    scores, each with its bias, have the largest sum. They have at least ``top_k`` experts.
    """
    return _run(
        "grouped_topk", router_logits_TE, top_k, renormalize, slot_mapping_T, num_groups, topk_groups, group_top,
        sigmoid, bias_E, scale,
    )  # fmt: skip


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed key or value cache [num_blocks, J, block_size, D] on the default device, in whatever order of memory the
    implementation of ``paged_attention`` reads."""
    return _own("zeroed_cache", "paged_attention", torch.get_default_device().type, memory)(shape, dtype)


def zeroed_state(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed pool of recurrent states [S, H, D, E] on the default device, in whatever order of memory the
    implementation of ``gated_delta_net`` keeps."""
    return _own("zeroed_state", "gated_delta_net", torch.get_default_device().type, memory)(shape, dtype)


def paged_attention_workspace(
    device: torch.device,
    num_tokens: int,
    max_model_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
) -> int:
    """Bytes that ``paged_attention`` allocates for a time, at most, in a step of ``num_tokens`` token rows."""
    module = choose(device.type)["paged_attention"].module
    of = getattr(module, "paged_attention_workspace", None)
    return 0 if of is None else of(num_tokens, max_model_len, num_heads, num_kv_heads, head_size, dtype)


def _forms(operator: str, device: torch.device, *args: Any) -> list[Any]:
    """Of the implementation that was chosen, and of those that may run in its place."""
    choice = choose(device.type)[operator]
    of = [getattr(module, f"{operator}_forms", None) for module in (choice.module, *(m for _, m in choice.followers))]
    return sorted({form for each in of if each is not None for form in each(*args)})


def paged_attention_forms(
    device: torch.device, num_tokens: int, num_reqs: int, max_model_len: int
) -> list[tuple[int, int, int]]:
    """(token rows, requests, tokens of the longest context) of the steps in which each form of ``paged_attention`` runs
    that a step up to the given sizes can take, and that is compiled when it first runs; whatever the heads are."""
    return _forms("paged_attention", device, num_tokens, num_reqs, max_model_len)


def fused_experts_forms(device: torch.device, num_tokens: int, S: int, E: int, dtype: torch.dtype) -> list[int]:
    """Numbers of rows, up to ``num_tokens``, in which each form of ``fused_experts`` that is compiled when it first
    runs is taken."""
    return _forms("fused_experts", device, num_tokens, S, E, dtype)


def quantized_linear_forms(device: torch.device, num_tokens: int) -> list[int]:
    """As ``fused_experts_forms``, for ``quantized_linear``."""
    return _forms("quantized_linear", device, num_tokens)


def num_compiled() -> int:
    """Kernels that Triton has compiled for this process, for each form and each kind of arguments."""
    of = sys.modules.get("vllm.kernels.triton")
    return 0 if of is None else of.num_compiled()


def preferred_block_size(device_type: str, head_size: int, default: int) -> int:
    """Token rows of a cache block that the first installed ``paged_attention`` has kernels for: ``default`` if it can.

    Asked before a rank has its device, so no kernel is run to find out.
    """
    of = getattr(first_installed("paged_attention", device_type), "preferred_block_size", None)
    return default if of is None else of(head_size, default)


def gated_delta_net(
    x_TN: Tensor,
    weights: GDNWeights,
    conv_state: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    query_start_loc_cpu: Tensor | None = None,
) -> Tensor:
    """The gated delta net between its projections: [T, H·E] of x's dtype, prefill and decode mixed; letters and
    definition are those of ``reference_gdn``.

    Args:
        x_TN: [T, N], the projection's rows q | k | v | z | b | a.
        conv_state: [S, K − 1, C] of x's dtype; recurrent_state: [S, H, D, E] fp32. Slots of the step's requests are
            updated, no other byte is touched.
        query_start_loc: int32 [R + 1], rising from 0; ``query_start_loc_cpu`` is the same on the host, where given.
        state_indices: int32 [R], each in [0, S).

    A request's result does not depend on the batch around it.
    """
    return _run(
        "gated_delta_net", x_TN, weights, conv_state, recurrent_state, query_start_loc, state_indices,
        query_start_loc_cpu,
    )  # fmt: skip


def row_max(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, float32 [R], and its token id, int64 [R], the lowest among equals.

    A row that holds a NaN has the value NaN, and the id of some token. ``logits``: any float dtype, rows contiguous.
    """
    return _run("row_max", logits_RV)


def apply_penalties(
    logits_RV: Tensor,
    starts: Tensor,
    tokens_P: Tensor,
    counts_P: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> None:
    """Changes ``logits`` [R, V] float32 in place at the tokens that each row has seen.

    Repetition (arXiv:1909.05858): a positive logit is divided, a negative one multiplied. Then the presence penalty is
    subtracted once, and the frequency penalty once per occurrence, where the token is in the output.

    Args:
        starts: int32 [R + 1], rising from 0 to P: row r has seen ``tokens[starts[r] : starts[r + 1]]``.
        tokens_P, counts_P: int64 and float32, a row's tokens, each once, and how often each is in its output.
        repetition_R, frequency_R, presence_R: float32.
    """
    _run("apply_penalties", logits_RV, starts, tokens_P, counts_P, repetition_R, frequency_R, presence_R)


def sample(
    logits_RV: Tensor,
    largest_R: Tensor,
    likeliest_R: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    top_k_R: Tensor | None = None,
    top_p_R: Tensor | None = None,
    log_min_p_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A token for each row, int64 [R], and the least ``logit / temperature`` that it could have had, float32 [R].

    The least is -inf without limits. Of the tokens whose probability is at least min_p times the likeliest's the top_k
    largest may be taken, and of those the fewest likeliest whose share is at least top_p, never none. A limit is a
    value of ``logit / temperature``: tokens that equal the last one that is in are in, -0 and 0 are equal. One number
    from ``reference_sampling.random_bits`` decides a row, by the inverse of the cumulative distribution in the order
    of the ids; the rows around it do not.

    Args:
        logits_RV: any float dtype, rows contiguous.
        largest_R, likeliest_R: their ``row_max``. Where the largest is not finite the token is the likeliest, and the
            least is -inf.
        temperature_R: float32; 0 takes the likeliest, whatever the limits, and the least is -inf.
        seeds_R, positions_R: int64; a seed's 64 bits and the output position.
        top_k_R: int64, V where off; top_p_R: float32, 1 where off; log_min_p_R: float32, -inf where off.
    """
    return _run(
        "sample", logits_RV, largest_R, likeliest_R, temperature_R, seeds_R, positions_R, top_k_R, top_p_R, log_min_p_R
    )


def log_probabilities(
    logits_RV: Tensor, num_logprobs: int, token_ids_R: Tensor, normalise: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of ``token_ids`` (int64 [R]) and of the ``num_logprobs`` <= V likeliest tokens of each row.

    Returns token ids int32 and log-probabilities float32 [R, 1 + num_logprobs], likeliest last but the first column,
    which is the given token; and its rank int32 [R], 1 + the number of strictly likelier ones. Without ``normalise``
    the logits themselves are given. Which of equal tokens is among the likeliest is the implementation's.
    """
    return _run("log_probabilities", logits_RV, num_logprobs, token_ids_R, normalise)


def check_fp8_cache(device_type: str) -> None:
    """
    Raises:
        ValueError: what would read and write a float8 cache on this device does it wrong.
    """
    for operator in ATTENTION if device_type != "cpu" else ():
        choice = choose(device_type)[operator]
        function = getattr(sys.modules[__name__], operator)
        wrong = checks.failure(operator, function, device_type, choice.module, fp8_cache=True)
        if wrong is not None:
            raise ValueError(
                f"kv_cache_dtype='fp8': {operator} by {choice.implementation} fails its check with a float8 cache on "
                f"{device_type} ({wrong}); use kv_cache_dtype='auto', or another implementation with VLLM_KERNELS"
            )
