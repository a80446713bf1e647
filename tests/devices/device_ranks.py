# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the device suite run. This module is imported where ranks are forked, so it asks no device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import device_suite as suite
import layout_checks
import rank_checks
import tiny_models as tiny
import torch
from rank_checks import assert_same, own_rank, own_world, unchanged

from vllm.distributed import (
    destroy_distributed_environment,
    get_dp_group,
    get_ep_group,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.kernels import ops, reference, weights

NAN = float("nan")
# Rows by rank: the B60 case's prompts and its hang, an idle rank, and one that has nearly all.
RAGGED = {2: [[26, 30], [7, 5], [0, 9], [1, 200]], 4: [[7, 5, 11, 7], [5, 5, 8, 8], [13, 13, 15, 15], [3, 0, 2, 4]]}


def poison() -> None:
    warnings.simplefilter("ignore")
    torch.set_deterministic_debug_mode("warn")  # not use_deterministic_algorithms, which imports the compiler


def values(rank: int, rows: int, width: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """Small integers, of which every sum is exact in every type."""
    generator = torch.Generator("cpu").manual_seed(1000 * salt + rank)
    return torch.randint(0, 9, (rows, width), generator=generator, device="cpu").to(dtype)


def exchange() -> tuple[str, str, int]:
    """Every collective with ragged rows, on the device: exact, inputs unchanged. (device, backend, collectives)"""
    poison()
    init_distributed_environment()
    group, world, rank = get_world_group(), own_world(), own_rank()
    device = group.device
    with rank_checks.observed(0.005) as ledger:
        for salt, sizes in enumerate(RAGGED[world]):
            kinds = ((64, torch.bfloat16), (3, torch.float32), (5, torch.int32))
            everyones = [[values(r, n, width, dtype, salt) for width, dtype in kinds] for r, n in enumerate(sizes)]
            own = [x.to(device) for x in everyones[rank]]
            with unchanged(*own):
                gathered = group.all_gatherv(own, 0, sizes)
            for i, x in enumerate(gathered):
                assert_same(x.cpu(), torch.cat([of[i] for of in everyones]))
            wholes = [values(r, sum(sizes), 64, torch.bfloat16, salt + 50) for r in range(world)]
            mine, begin = wholes[rank].to(device), sum(sizes[:rank])
            with unchanged(mine):
                part = group.reduce_scatterv(mine, 0, sizes)
            assert_same(part.cpu(), torch.stack(wholes).sum(0)[begin : begin + sizes[rank]])
            with unchanged(mine):
                assert_same(group.all_reduce(mine).cpu(), torch.stack(wholes).sum(0))
            sent = group.broadcast(wholes[rank].to(device), world - 1)
            assert_same(sent.cpu(), wholes[-1])
        for _ in range(3):
            group.barrier()
    backend = torch.distributed.get_backend(group.device_group)
    done = (str(device), backend, len(ledger.records))
    destroy_distributed_environment()
    return done


def groups_stay_apart(tp: int, dp: int) -> None:
    """Sums over TP, DP and EP groups have their own ranks' terms and no others."""
    poison()
    init_distributed_environment()
    initialize_model_parallel(tp, dp, True)
    for group in (get_tp_group(), get_dp_group(), get_ep_group()):
        own = torch.full((5,), float(10 ** own_rank()), device=group.device)
        assert group.all_reduce(own).unique().tolist() == [sum(10.0**r for r in group.ranks)]
    destroy_distributed_environment()


def exchanged_experts(tp: int, dp: int, real: Sequence[int], padded: Sequence[int], many_bytes: bool) -> float:
    """Dispatch, this rank's experts, combine, at a real model's widths: the rows of each DP rank as one process would
    compute them, pads exactly 0 whatever they held. Returns the largest relative error."""
    poison()
    init_distributed_environment()
    initialize_model_parallel(tp, dp, True)
    ep, dp_rank, device = get_ep_group(), get_dp_group().rank_in_group, get_world_group().device
    assert ep.all2all_manager is not None
    ep.all2all_manager.sequence_parallel_bytes = 0 if many_bytes else 1 << 60
    s = suite.sizes()
    E, K, D, inner, T = max(s.experts // 4, 8), s.top_k, s.hidden, s.expert_inner, padded[dp_rank]
    generator = torch.Generator("cpu").manual_seed(3)

    def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cpu") * scale).to(torch.bfloat16)

    w13, w2 = noise(E, 2 * inner, D, scale=D**-0.5), noise(E, D, inner, scale=inner**-0.5)
    rows = [noise(n, D) for n in padded]
    ids = [torch.rand(n, E, generator=generator).argsort(1)[:, :K].int() for n in padded]
    shares = [torch.rand(n, K, generator=generator) for n in padded]
    for r, n in enumerate(real):
        rows[r][n:], ids[r][n:], shares[r][n:] = NAN, -1, 0
    x, own_ids, own_shares = rows[dp_rank], ids[dp_rank], shares[dp_rank]
    wide = [weights.pack_expert_weights(w.double(), gated) for w, gated in ((w13, True), (w2, False))]
    right = reference.fused_experts(x.double(), *wide, own_ids, own_shares.double())

    per_rank = E // ep.world_size
    first = ep.rank_in_group * per_rank
    here = slice(first, first + per_rank)
    packed = [ops.pack_expert_weights(w[here].to(device), gated) for w, gated in ((w13, True), (w2, False))]
    sent = ep.dispatch(x.to(device), own_shares.to(device), own_ids.to(device), list(padded))
    local = sent.topk_ids - first
    local[(local < 0) | (local >= per_rank)] = -1
    got = ep.combine(ops.fused_experts(sent.hidden_states, *packed, local, sent.topk_weights), sent).cpu().double()
    destroy_distributed_environment()
    assert got.shape == (T, D)
    assert (got[real[dp_rank] :] == 0).all(), "a pad row is not exactly 0"
    if not T or not real[dp_rank]:
        return 0.0
    scale = right.square().mean().sqrt()
    return float(((got - right).abs() / (right.abs() + scale)).max())


def loads(folder: str, tp: int, dp: int, ep: bool, names: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of a tiny model under the loads of ``layout_checks``."""
    poison()
    return layout_checks.run_loads(folder, tp, dp, ep, names, 0.001)


def idle_rank(folder: str) -> tuple[bool, list[tuple[int, ...]]]:
    """Rank 1 keeps rank 0 company for 20 steps, NaN in its caches and states and in its dummies' embeddings; (whether
    every bit of caches and states stayed, tokens)."""
    poison()
    llm = layout_checks.rank_llm(folder, 1, 2)
    runner = llm.llm_engine.worker.runner
    pools = [x for layer in runner.cached_layers.values() for x in held_by(layer)]
    assert pools, "no layer holds anything"
    idle = own_rank() == 1
    if idle:
        generator = torch.Generator("cpu").manual_seed(7)
        for pool in pools:
            pool.copy_(torch.randn(pool.shape, generator=generator, device="cpu"))
            pool[::2] = NAN
        embed = runner.model.model.embed_tokens
        embed.register_forward_hook(lambda module, given, out: torch.full_like(out, NAN))
    before = [rank_checks.bits(pool).clone() for pool in pools]
    outputs = tiny.generate(llm, [] if idle else [tiny.prompt(9, seed=10)], 21)
    same = all(torch.equal(rank_checks.bits(pool), old) for pool, old in zip(pools, before, strict=True))
    llm.shutdown()
    return same, tiny.tokens(outputs)


def held_by(layer: Any) -> list[torch.Tensor]:
    return list(layer.kv_cache) if hasattr(layer, "kv_cache") else [layer.conv_state, layer.recurrent_state]
