# SPDX-License-Identifier: Apache-2.0
"""Sampling in Triton against its definition in fp64, and its twin's very tokens, with NaN beside every row."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import given, settings, st

from vllm.kernels import reference
from vllm.kernels.reference_sampling import random_bits

pytest.importorskip("triton")
import triton
import triton.language as tl
from row_cases import DTYPES, NAN, few, randn, wide_rows

from vllm.kernels import triton as operators
from vllm.kernels.triton import sampling

INF = math.inf


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_TILE", 64)


def some_logits(R: int, V: int, dtype: torch.dtype, ties: bool, seed: int = 0) -> torch.Tensor:
    """With ``ties`` of nine values, both zeros among them, and -inf."""
    x = 2 * randn(R, V, seed=seed)
    if ties:
        x = x.round().clamp(-4, 4)
        x[x < -2] = -INF
        x[:, 0] = 0.0
    return x.to(dtype)


# --- the likeliest token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 37, 64, 150])
def test_row_max(V, dtype, nan_poison):
    x = some_logits(5, V, dtype, ties=True)
    x[1], x[2, -1], x[3] = -INF, INF, -1.0
    x[4, V // 2] = NAN
    values, ids = operators.row_max(wide_rows(x, "cpu"))
    assert values.dtype is torch.float32
    assert values[:4].tolist() == [max(row) for row in x[:4].tolist()]
    assert ids[:4].tolist() == [row.index(max(row)) for row in x[:4].tolist()]
    assert values[4].isnan()
    assert 0 <= ids[4] < V


# --- the drawn token --------------------------------------------------------------------------------------------------

Limits = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
TOP = 10**9
RATES = st.tuples(
    st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.9]),
    st.sampled_from([TOP, TOP, 1, 3, 30]),
    st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
    st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0]),
)


def arguments(x: torch.Tensor, limits: list[Limits], seed: int = 0) -> tuple[torch.Tensor | None, ...]:
    """A limit that no row has is None, as in an engine."""
    V = x.shape[1]
    temperature, top_k, top_p, min_p = (torch.tensor(each) for each in zip(*limits, strict=True))
    seeds = torch.arange(len(limits)) * 2**59 - 2**62 + seed
    top_k = top_k.clamp(max=V)
    return (
        *reference.row_max(x), temperature, seeds, torch.arange(len(limits)) + 3,
        top_k if (top_k < V).any() else None, top_p if (top_p < 1).any() else None,
        min_p.log() if min_p.any() else None,
    )  # fmt: skip


def assert_drawn_by_the_law(
    x: torch.Tensor, limits: list[Limits], args: tuple[Any, ...], tokens: torch.Tensor, lowest: torch.Tensor
) -> None:
    """Limits and the place of the noise by the definition, in fp64 of fp32's quotients; masses may be off by 3e-6."""
    noise = (random_bits(args[3], args[4]).numpy().view("uint64") / 2.0**64).tolist()
    for row, (temperature, top_k, top_p, min_p) in enumerate(limits):
        largest, token = float(args[0][row]), int(tokens[row])
        if temperature == 0 or not math.isfinite(largest):
            assert token == args[1][row]
            continue
        scaled = x[row].float() / torch.tensor(temperature)
        kept = scaled >= lowest[row]
        scaled = scaled.double()
        weights = (scaled - scaled.max()).exp()
        weights[weights < min_p * (1 - 1e-6)] = 0
        least, of_k = -INF, weights.sum()
        if top_k < len(scaled):
            in_order = scaled.sort(descending=True)
            least, of_k = in_order.values[top_k - 1], weights[in_order.indices[:top_k]].sum()
        in_turn = scaled[(weights > 0) & (scaled >= least)].unique().tolist()[::-1]
        if top_p < 1:
            masses = torch.tensor([float(weights[scaled >= value].sum()) for value in in_turn])
            needed = top_p * of_k
            first, last = (int((masses < needed + slack).sum()) for slack in (-3e-6, 3e-6))
            right = [scaled >= value for value in in_turn[first : last + 1]]
        else:
            right = [scaled >= in_turn[-1]]
        assert any(torch.equal(kept & (weights > 0), each & (weights > 0)) for each in right), (row, limits[row])
        weights[~kept] = 0
        up_to = weights.cumsum(0) / weights.sum()
        assert weights[token] > 0
        assert up_to[token] - weights[token] / weights.sum() - 3e-6 <= noise[row] <= up_to[token] + 3e-6


def check(x: torch.Tensor, limits: list[Limits], device: Any = "cpu", seed: int = 0) -> tuple[Any, ...]:
    args = arguments(x, limits, seed)
    on_device = (None if each is None else each.to(device) for each in args)
    tokens, lowest = operators.sample(wide_rows(x, device), *on_device)
    assert (tokens.dtype, lowest.dtype) == (torch.int64, torch.float32)
    assert_drawn_by_the_law(x, limits, args, tokens.cpu(), lowest.cpu())
    return args, tokens, lowest


few_draws = settings(few, max_examples=12)


@few_draws
@given(
    st.lists(RATES, min_size=1, max_size=4),
    st.sampled_from([1, 37, 64, 150]),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
)
def test_draws(nan_poison, limits, V, ties, dtype, seed):
    """Rows of any limits side by side; the twin, to the bit, in tokens and in what it lets be drawn."""
    x = some_logits(len(limits), V, dtype, ties, seed)
    args, tokens, lowest = check(x, limits, seed=seed)
    by_twin, lowest_of_twin = reference.sample(x, *args)
    assert torch.equal(tokens, by_twin)
    scaled = x.float() / args[2].masked_fill(args[2] == 0, 1)[:, None]
    assert torch.equal((scaled >= lowest[:, None]) & (x > -INF), (scaled >= lowest_of_twin[:, None]) & (x > -INF))


def test_every_limit_at_its_ends(nan_poison):
    """Ties at each threshold, one possible token, a flat row, rows that are NaN or have no finite largest logit."""
    V = 70
    x = randn(11, V)
    x[0, [5, 66, 9]], x[1, [5, 66, 9]] = 7.0, 7.0
    x[2], x[3], x[4] = -INF, 0.0, 0.0
    x[2, 66] = -40.0
    x[4, ::2] = -0.0
    x[5, 3], x[6], x[7, 65] = NAN, -INF, INF
    limits = [
        (1.0, 1, 1.0, 0.0), (1.0, TOP, 1e-9, 1.0), (0.5, 2, 0.5, 0.1), (1.0, 3, 0.4, 0.5), (1.0, 3, 0.4, 1.0),
        (1.0, 3, 0.4, 0.5), (1.0, 3, 0.4, 0.5), (1.0, 3, 0.4, 0.5), (0.0, 1, 1.0, 0.0), (1.0, V, 1.0, 0.0),
        (1.0, V - 1, 0.99999, 0.0),
    ]  # fmt: skip
    for seed in range(2):
        args, tokens, lowest = check(x, limits, seed=seed)
        assert {*tokens[:2].tolist()} <= {5, 66, 9}
        assert lowest[:5].tolist() == [7, 7, -80, 0, 0]
        assert tokens[2] == 66
        assert tokens[5:9].tolist() == args[1][5:9].tolist()
        assert torch.equal(tokens[[0, 1, 2, 3, 4, 8, 9, 10]], reference.sample(x, *args)[0][[0, 1, 2, 3, 4, 8, 9, 10]])


@pytest.mark.parametrize("k", [3, 4])
def test_top_p_is_of_the_first_k_where_others_equal_the_last(k, nan_poison):
    """One token, then four that are equal, zeros of both signs: the share is of the one and the first k - 1."""
    w = 0.2
    x = torch.full((1, 40), -INF)
    x[0, 7], x[0, [1, 9, 30, 39]] = -math.log(w), torch.tensor([0.0, -0.0, 0.0, -0.0])
    share = 1 / (1 + (k - 1) * w)  # 1 / (1 + 4 w) of all that are kept
    for p, alone in ((share - 0.01, True), (share + 0.01, False)):
        _, _, lowest = check(x, [(1.0, k, p, 0.0)])
        assert (lowest[0] > 0) == alone


def test_a_row_is_drawn_alone_as_in_a_batch_whatever_the_tile(monkeypatch):
    x = some_logits(4, 150, torch.float32, ties=False)
    limits = [(1.0, TOP, 1.0, 0.0), (0.7, 40, 0.9, 0.01), (1.5, TOP, 0.8, 0.0), (0.0, TOP, 1.0, 0.0)]
    args = arguments(x, limits)
    tokens, lowest = operators.sample(x, *args)
    for r in (1, 2):
        alone = operators.sample(x[r : r + 1], *(each[r : r + 1] for each in args))
        assert [each.tolist() for each in alone] == [[tokens[r]], [lowest[r]]]
    monkeypatch.setattr(sampling, "_TILE", 32)
    assert all(torch.equal(a, b) for a, b in zip(operators.sample(x, *args), (tokens, lowest), strict=True))


def test_seeded_draws_are_the_twins(nan_poison):
    """Many seeds over a few tokens: each number picks the token that the twin's picks, and all occur."""
    x = some_logits(60, 37, torch.float32, ties=False)[:1].expand(60, -1) / 2
    args = arguments(x, [(1.0, TOP, 1.0, 0.0)] * 60)
    tokens, _ = operators.sample(x, *args)
    assert torch.equal(tokens, reference.sample(x, *args)[0])
    assert len(set(tokens.tolist())) > 15


def seed_of(bits: int) -> int:
    """Whose number at position 0 is ``bits``: the stream run backwards."""

    def unmixed(z: int) -> int:
        for by, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            whole = z
            for _ in range(3):
                z = whole ^ (z >> by)
            z = z * pow(factor, -1, 2**64) % 2**64
        return z

    seed = unmixed((unmixed(bits) - 0x9E3779B97F4A7C15) % 2**64)
    return seed - 2**64 * (seed >= 2**63)


def test_the_ends_of_the_noise_pick_possible_tokens(nan_poison):
    """0 and the largest number, where the first and the last tokens and tiles are impossible."""
    x = torch.full((2, 300), -INF)
    x[:, [130, 131, 199]] = torch.tensor([-7.0, 0.0, -9.0])
    args = list(arguments(x, [(1.0, TOP, 1.0, 0.0)] * 2))
    args[3], args[4] = torch.tensor([seed_of(0), seed_of(2**64 - 1)]), torch.zeros(2, dtype=torch.int64)
    assert random_bits(args[3], args[4]).tolist() == [0, -1]
    assert operators.sample(x, *args)[0].tolist() == [130, 199]


@triton.jit
def _bits_kernel(seeds, positions, out):
    i = tl.program_id(0)
    bits = sampling._random_bits(tl.load(seeds + i), tl.load(positions + i))
    tl.store(out + i, bits.to(tl.int64, bitcast=True))


def test_random_bits_are_the_twins():
    seeds = torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, 123456789])
    for positions in (torch.arange(6), torch.arange(6) + 2**31 - 3, torch.arange(6) - 2):
        out = torch.empty_like(seeds)
        _bits_kernel[(6,)](seeds, positions, out)
        assert torch.equal(out, random_bits(seeds, positions))


# --- penalties --------------------------------------------------------------------------------------------------------


def check_penalties(seen: list[int], V: int, device: Any) -> None:
    """``seen``: how many tokens of each row; half of them are in the output."""
    R = len(seen)
    x = randn(R, V)
    tokens = [torch.randperm(V, generator=torch.Generator().manual_seed(r))[:n] for r, n in enumerate(seen)]
    counts = torch.randint(0, 3, (sum(seen),), generator=torch.Generator().manual_seed(1)).float()
    starts = torch.tensor([0, *seen]).cumsum(0).int()
    rates = [torch.linspace(low, high, R) for low, high in ((0.5, 2.0), (-1.0, 1.0), (1.5, -0.5))]
    want, at = x.double(), 0
    for r, of_row in enumerate(tokens):
        for token in of_row.tolist():
            value, count = want[r, token].item(), counts[at].item()
            value = value / rates[0][r].item() if value > 0 else value * rates[0][r].item()
            want[r, token] = value - rates[1][r].item() * count - rates[2][r].item() * (count > 0)
            at += 1
    for module, where in ((operators, device), (reference, "cpu")):
        got = wide_rows(x, where)
        module.apply_penalties(got, *(each.to(where) for each in (starts, torch.cat(tokens), counts, *rates)))
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)
        untouched = torch.ones(R, V, dtype=torch.bool)
        for r, of_row in enumerate(tokens):
            untouched[r, of_row] = False
        assert torch.equal(got.cpu()[untouched], x[untouched])


@pytest.mark.parametrize("seen", [[1], [0, 70, 0, 3], [64, 65, 0], [0, 0]])
def test_penalties(seen, nan_poison):
    check_penalties(seen, 80, "cpu")


# --- log-probabilities ------------------------------------------------------------------------------------------------


def check_logprobs(
    R: int, V: int, num_logprobs: int, dtype: torch.dtype, normalise: bool, device: Any, offset: float = 0
) -> None:
    x = (2 * randn(R, V) + offset).to(dtype)
    x[0, : V // 2] = -INF
    ids = torch.arange(R) * 7919 % V
    ids[0] = x[0].argmax()
    got = operators.log_probabilities(wide_rows(x, device), num_logprobs, ids.to(device), normalise)
    token_ids, logprobs, ranks = (each.cpu() for each in got)
    assert (token_ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    table = x.double().log_softmax(-1) if normalise else x.double()
    assert torch.equal(token_ids[:, 0].long(), ids)
    assert all(len(set(row)) == num_logprobs for row in token_ids[:, 1:].tolist())
    torch.testing.assert_close(logprobs.double(), table.gather(1, token_ids.long()), rtol=3e-7, atol=4e-6)
    torch.testing.assert_close(logprobs[:, 1:].double(), table.topk(num_logprobs).values, rtol=3e-7, atol=4e-6)
    assert torch.equal(ranks.long(), 1 + (x > x.gather(1, ids[:, None])).sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("V", "num_logprobs", "normalise"), [(1, 1, True), (65, 0, True), (150, 5, True), (40, 3, False)]
)
def test_logprobs(V, num_logprobs, normalise, dtype, nan_poison):
    check_logprobs(4, V, num_logprobs, dtype, normalise, "cpu")


def test_logprobs_far_from_zero(nan_poison):
    """Without their largest taken off first, the exponentials would overflow."""
    check_logprobs(3, 70, 4, torch.float32, True, "cpu", offset=300.0)
    check_logprobs(3, 70, 4, torch.float32, True, "cpu", offset=-300.0)


# --- misuse, compilation ----------------------------------------------------------------------------------


def test_misuse_is_named():
    with pytest.raises(NotImplementedError, match="float64 is none of"):
        operators.row_max(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="a vocabulary of 2000000, the most is 1048576"):
        operators.row_max(torch.zeros(1).expand(1, 2_000_000))
    x = torch.zeros(2, 8)
    args = arguments(x, [(1.0, 3, 0.5, 0.1)] * 2)
    with pytest.raises(AssertionError, match=r"top_k is .*int32, needed \(2,\) int64"):
        operators.sample(x, *args[:5], args[5].int())
    with pytest.raises(AssertionError, match=r"starts is \(2,\), needed \(3,\)"):
        operators.apply_penalties(x, torch.zeros(2).int(), args[3], args[2], args[2], args[2], args[2])
    none = torch.zeros(0, 8)
    empty = [each[:0] for each in args]
    assert [each.shape for each in operators.sample(none, *empty)] == [(0,), (0,)]
    assert operators.row_max(none)[0].shape == (0,)
    assert operators.log_probabilities(none, 2, empty[3])[0].shape == (0, 3)


COMPILED = """
import sys, torch, compiling
from vllm.kernels.triton import sampling

def new(*size, dtype=torch.float32):
    return torch.empty(*size, dtype=dtype, device="meta")

R, V = 64, 151936
rows, ids, starts = new(R), new(R, dtype=torch.int64), new(R + 1, dtype=torch.int32)
calls = [lambda: sampling.apply_penalties(new(R, V), starts, new(999, dtype=torch.int64), new(999), rows, rows, rows)]
for dtype in (torch.float32, torch.bfloat16):
    x = new(R, V, dtype=dtype)
    calls += [
        lambda x=x: sampling.row_max(x),
        lambda x=x: sampling.sample(x, rows, ids, rows, ids, ids, ids, rows, rows),
        lambda x=x: sampling.log_probabilities(x, 20, ids),
    ]
for call in calls:
    for launch in compiling.launches(sampling, call):
        made = compiling.compile_launch(launch, int(sys.argv[1]))
        ptx, name = made.asm["ptx"], launch.kernel.__name__
        print(name, launch.grid, launch.options, made.metadata.shared, flush=True)
        assert "ld.local" not in ptx and ".f64" not in ptx, name
        if name in ("_sample_kernel", "_penalties_kernel"):
            assert "div.rn.f32" in ptx and "div.full.f32" not in ptx, name
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_sampling_compiles_for_cuda(capability, tmp_path):
    """No fp64, nothing spilled, and quotients rounded as the twin's."""
    pytest.importorskip("triton.backends.nvidia.compiler")
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here.parents[2]}:{here}", "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 7
