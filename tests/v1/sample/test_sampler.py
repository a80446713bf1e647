# SPDX-License-Identifier: Apache-2.0
"""The sampler against exact distributions, transformers' penalty, fp64 and itself in other batches."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import RepetitionPenaltyLogitsProcessor

from vllm.kernels import reference_sampling
from vllm.kernels.reference_sampling import random_bits, row_max, uniform_noise
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler, process_logits
from vllm.v1.sample.state import SamplingState

NEVER = -1


@pytest.fixture(autouse=True)
def poison(nan_poison):
    """Every uninitialised byte is NaN."""


def request(params: SamplingParams, prompt=(1, 2, 3), output=(), eos=NEVER, name="r") -> Request:
    made = Request(name, list(prompt), params, eos_token_id=eos if eos != NEVER else None)
    made.all_token_ids += list(output)
    return made


def state_of(requests: list[Request], vocab_size: int, seed: int = 0) -> SamplingState:
    state = SamplingState(len(requests), vocab_size, seed=seed)
    for row, made in enumerate(requests):
        state.add_row(row, made)
    return state


def sample(logits: torch.Tensor, requests: list[Request], seed: int = 0):
    return Sampler()(logits, state_of(requests, logits.shape[1], seed).make_metadata())


def exact(logits: list[float], params: SamplingParams) -> np.ndarray:
    """The distribution in fp64, token by token."""
    x = [value / params.temperature for value in logits]
    weights = [math.exp(value - max(x)) for value in x]
    if params.min_p:
        weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k:
        least = sorted(weights)[-min(params.top_k, len(weights))]
        weights = [w if w >= least else 0.0 for w in weights]
    if params.top_p < 1:
        order = sorted(set(weights), reverse=True)
        kept, mass = 0.0, 0.0
        for value in order:
            mass += value * weights.count(value)
            kept = value
            if mass >= params.top_p * sum(weights):
                break
        weights = [w if w >= kept else 0.0 for w in weights]
    return np.array(weights) / sum(weights)


def draws(logits: torch.Tensor, params: SamplingParams, num_draws: int, seed: int = 0) -> np.ndarray:
    """Counts [V] of ``num_draws`` tokens, in batches of 500 rows of different seeds at successive positions."""
    vocab_size = logits.shape[0]
    requests = [request(params) for _ in range(500)]
    state = state_of(requests, vocab_size, seed)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _ in range(num_draws // 500):
        tokens = Sampler()(logits.expand(500, -1), state.make_metadata()).sampled_token_ids
        counts += np.bincount(tokens.numpy(), minlength=vocab_size)
        for made in requests:
            made.all_token_ids.append(0)
    return counts


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Nothing where nothing may be, and chi-square does not reject at 1 in 10,000."""
    assert counts[probabilities == 0].sum() == 0
    total = counts.sum()
    common = probabilities * total >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) > 1:
        assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


LIMITS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.1},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.2, "temperature": 1.3},
    {"top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 777])
def test_distribution_is_exact(limits, vocab_size):
    params = SamplingParams(**limits)
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    assert_distributed(draws(logits, params, 20_000), exact(logits.double().tolist(), params))


@pytest.mark.parametrize(
    "limits", [{"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 600, "top_p": 0.99}, {"top_k": 1200}], ids=str
)
def test_limits_beyond_the_first_selection(limits):
    """More tokens are kept than the first selection holds."""
    params = SamplingParams(**limits)
    logits = torch.randn(1500, generator=torch.Generator().manual_seed(3)) / 2
    probabilities = exact(logits.double().tolist(), params)
    assert (probabilities > 0).sum() > reference_sampling._SELECT
    assert_distributed(draws(logits, params, 15_000), probabilities)


def test_the_ends_of_the_noise_pick_possible_tokens():
    """0 and the largest number below 1, where the first and last tokens and blocks are impossible."""
    weights = torch.zeros(2, 1000)
    weights[:, [300, 301, 699]] = torch.tensor([1e-3, 1.0, 1e-12])
    noise = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    token_ids, found = reference_sampling.random_choice(weights, noise)
    assert token_ids[0] == 300
    assert token_ids[1] in (301, 699)
    assert found.all()


def test_chi_square_would_notice():
    """The check itself: noise that is off by a little is rejected."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(50)) * 2
    counts = draws(logits, SamplingParams(temperature=1.15), 20_000)
    with pytest.raises(AssertionError):
        assert_distributed(counts, exact(logits.double().tolist(), SamplingParams()))


def test_equal_logits_share_one_fate():
    """Limits that cut through equal logits keep all of them."""
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, -2.0])
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.1), SamplingParams(min_p=1.0)):
        assert_distributed(draws(logits, params, 5000), np.array([0, 1, 1, 1, 0]) / 3)


def test_only_one_token_possible():
    logits = torch.full((300,), -torch.inf)
    logits[271] = -5.0
    for params in (SamplingParams(**kw) for kw in LIMITS):
        assert draws(logits, params, 500)[271] == 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 1000])
def test_greedy_takes_the_lowest_of_the_largest(dtype, vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (40, vocab_size), generator=generator).to(dtype)
    values, token_ids = row_max(logits)
    for row in range(40):
        expected = logits[row].tolist().index(max(logits[row].tolist()))
        assert (values[row].item(), token_ids[row].item()) == (logits[row, expected].item(), expected)
    greedy = [request(SamplingParams(temperature=0)) for _ in range(40)]
    assert torch.equal(sample(logits, greedy).sampled_token_ids, token_ids)


def test_logits_are_not_changed():
    logits = torch.randn(2, 60)
    before = logits.clone()
    sample(logits, [request(SamplingParams(repetition_penalty=2.0, top_k=3, logprobs=2)) for _ in range(2)])
    assert torch.equal(logits, before)


# --- independence of rows ---------------------------------------------------------------------------------------------

MIXED = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 5},
    {"seed": 3, "top_p": 0.8},
    {"seed": 4, "min_p": 0.1, "temperature": 0.6},
    {"seed": 5, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"seed": 6, "logit_bias": {3: 4.0}},
    {"seed": 7, "allowed_token_ids": [1, 5, 700, 900]},
    {"seed": 8, "min_tokens": 9, "stop_token_ids": [4, 5]},
    {"seed": 9, "top_k": 700, "top_p": 0.99},
    {"seed": 10, "logprobs": 3},
    {"temperature": 0, "frequency_penalty": 1.0},
]


def test_a_seeded_row_does_not_depend_on_the_batch():
    """Each of 12 kinds of request: alone, in a batch of 12 and in a shuffled batch of 36, for 20 tokens."""
    vocab_size, steps = 1500, 20
    logits = torch.randn(steps, len(MIXED), vocab_size, generator=torch.Generator().manual_seed(1)) * 2

    def run(order: list[int]) -> dict[int, list[int]]:
        requests = [request(SamplingParams(**MIXED[kind])) for kind in order]
        state = state_of(requests, vocab_size, seed=len(order))
        for step in range(steps):
            tokens = Sampler()(logits[step, order], state.make_metadata()).sampled_token_ids
            for made, token in zip(requests, tokens.tolist(), strict=True):
                made.all_token_ids.append(token)
        return {kind: made.output_token_ids for kind, made in zip(order, requests, strict=True)}

    together = run(list(range(len(MIXED))))
    for kind in range(len(MIXED)):
        assert run([kind])[kind] == together[kind], MIXED[kind]
    shuffled = np.random.default_rng(0).permutation(list(range(len(MIXED))) * 3).tolist()
    assert run(shuffled) == together


def test_a_seeded_request_goes_on_after_a_preemption():
    logits = torch.randn(10, 1, 400, generator=torch.Generator().manual_seed(1))

    def run(preempt_at: int | None) -> list[int]:
        made = request(SamplingParams(seed=11, frequency_penalty=0.5))
        state = state_of([made], 400)
        for step in range(10):
            if step == preempt_at:
                state.remove_row(0)
                state.add_row(0, made)
            made.all_token_ids += Sampler()(logits[step], state.make_metadata()).sampled_token_ids.tolist()
        return made.output_token_ids

    assert run(None) == run(0) == run(5)


def test_unseeded_requests_differ_and_follow_the_engine_seed():
    logits = torch.zeros(8, 1000)

    def tokens(seed: int) -> list[int]:
        return sample(logits, [request(SamplingParams()) for _ in range(8)], seed).sampled_token_ids.tolist()

    assert len(set(tokens(5))) > 5
    assert tokens(5) == tokens(5) != tokens(6)


def test_an_unseeded_request_keeps_its_stream_through_preemptions():
    """Three requests come while a fourth is preempted again and again: it draws as it would have alone."""
    logits = torch.zeros(12, 1, 1000)

    def run(preempted: bool) -> list[int]:
        state = SamplingState(4, 1000, seed=3)
        made, others = request(SamplingParams(seed=None)), [request(SamplingParams()) for _ in range(3)]
        state.add_row(0, made)
        for step in range(12):
            if preempted and step % 4 == 2:
                state.remove_row(0)
                state.add_row(1 + step // 4, others[step // 4])
                state.add_row(0, made)
            made.all_token_ids += Sampler()(logits[step], state.make_metadata([0])).sampled_token_ids.tolist()
        return made.output_token_ids

    assert run(False) == run(True)
    assert len(set(run(True))) > 5


def test_seed_and_position_both_matter():
    seeds, positions = torch.meshgrid(torch.arange(60), torch.arange(60), indexing="xy")
    noise = uniform_noise(seeds, positions).numpy()
    assert noise.min() >= 0
    assert noise.max() < 1
    assert len(np.unique(noise)) == noise.size
    # Neighbouring seeds and positions are uncorrelated: 60 x 60 uniform numbers, 5 standard errors.
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 5 / 60
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 5 / 60


def test_splitmix64_reference_values():
    """First outputs for state 0 of the published C program by S. Vigna, from which the stream is defined."""
    states = torch.arange(1, 4) * reference_sampling._GOLDEN
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [z % 2**64 for z in reference_sampling._mix(states).tolist()] == expected
    # The stream of seed 0 is that of the mixed seed, which is 0.
    assert torch.equal(random_bits(torch.zeros(3, dtype=torch.int64), torch.arange(3)), reference_sampling._mix(states))


def test_noise_is_the_first_bits_whatever_holds_it():
    """By hand in Python's own integers; as fp32 the largest is still below 1."""
    seeds, positions = [0, 5, -1, -(2**63), 2**63 - 1], [0, 1, 2, 10**6, 2**31]

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    bits = [
        mix((mix(s % 2**64) + (at + 1) * 0x9E3779B97F4A7C15) % 2**64) for s, at in zip(seeds, positions, strict=True)
    ]
    given = torch.tensor(seeds), torch.tensor(positions)
    assert [z % 2**64 for z in random_bits(*given).tolist()] == bits
    assert uniform_noise(*given).tolist() == [(z >> 11) * 2.0**-53 for z in bits]
    assert uniform_noise(*given, torch.float32).tolist() == [(z >> 40) * 2.0**-24 for z in bits]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("whole_row", [False, True])
def test_a_nan_row_touches_no_other(bad, whole_row):
    vocab_size = 1000
    kinds = [SamplingParams(**kw) for kw in MIXED]
    logits = torch.randn(len(kinds), vocab_size, generator=torch.Generator().manual_seed(2))
    clean = sample(logits, [request(p) for p in kinds])
    for row in range(len(kinds)):
        broken = logits.clone()
        broken[row, slice(None) if whole_row else 333] = bad
        got = sample(broken, [request(p) for p in kinds])
        assert got.nan_rows() == [r == row for r in range(len(kinds))]
        assert 0 <= got.sampled_token_ids[row] < vocab_size
        others = [r for r in range(len(kinds)) if r != row]
        assert torch.equal(got.sampled_token_ids[others], clean.sampled_token_ids[others])
        assert torch.equal(got.logprobs_tensors.logprobs[others], clean.logprobs_tensors.logprobs[others])


def words(params: SamplingParams, *token_ids: list[int]) -> SamplingParams:
    params.bad_words_token_ids = list(token_ids)
    return params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("params", "raw", "reason"),
    [
        (
            {"allowed_token_ids": [4], "min_tokens": 1, "stop_token_ids": [4]},
            {},
            r"allowed_token_ids=\[4\]; min_tokens=1",
        ),
        ({"allowed_token_ids": [4, 5], "bad_words": ["x"]}, {}, r"allowed_token_ids=\[4, 5\]; bad_words=\['x'\]"),
        ({"allowed_token_ids": [4, 5], "top_k": 3, "top_p": 0.5}, {4: -math.inf, 5: -math.inf}, "allowed_token_ids"),
        ({"repetition_penalty": 1e-40}, {2: 3.0}, "repetition_penalty=1e-40"),
        ({"min_tokens": 2, "stop_token_ids": list(range(10))}, {}, "forbids the end tokens.*0, 1, 2"),
    ],
)
def test_nothing_left_to_draw_is_told_from_nan(temperature, params, raw, reason):
    """A defined token, the reason, no report of NaN; greedy and random neighbours draw what they drew alone."""
    made = SamplingParams(temperature=temperature, **params)
    if made.bad_words:
        words(made, [4], [5])
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(3)).repeat(4, 1)
    for token, value in raw.items():
        logits[1, token] = value
    logits[3] = torch.nan
    others = [SamplingParams(temperature=0, allowed_token_ids=[3, 7]), SamplingParams(seed=4, min_p=0.1)]
    requests = [request(others[0]), request(made), request(others[1]), request(SamplingParams(temperature=0))]
    state = state_of(requests, 10)
    got = Sampler()(logits, state.make_metadata())
    assert got.undrawable.tolist() == [False, True, False, False]
    assert got.nan_rows() == [False, False, False, True]
    alone = [sample(logits[:1], [request(p)]).sampled_token_ids.item() for p in others]
    assert got.sampled_token_ids[[0, 2]].tolist() == alone
    assert all(0 <= token < 10 for token in got.sampled_token_ids.tolist())
    assert re.search(rf"output position 0: .*{reason}.*loosen one", state.chosen()[1].why_undrawable())


def test_the_reason_names_only_what_still_holds():
    params = SamplingParams(min_tokens=1, stop_token_ids=[4], allowed_token_ids=list(range(40)))
    state = state_of([request(params, output=[1, 2])], 50)
    state.make_metadata()
    reason = state.chosen()[0].why_undrawable()
    assert "output position 2" in reason
    assert "min_tokens" not in reason
    assert "9, ...] (40)" in reason
    assert sample(torch.zeros(1, 50), [request(params)]).undrawable.tolist() == [False]


# --- changes to the logits --------------------------------------------------------------------------------------------


def processed(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    return process_logits(logits, state_of(requests, logits.shape[1]).make_metadata())


def test_repetition_penalty_equals_transformers():
    logits = torch.randn(3, 80, generator=torch.Generator().manual_seed(3))
    requests = [
        request(SamplingParams(repetition_penalty=penalty), prompt=[1, 2, 2, 9], output=[7, 1, 7])
        for penalty in (1.3, 0.7, 1.0)
    ]
    got = processed(logits, requests)
    for row, made in enumerate(requests):
        reference = RepetitionPenaltyLogitsProcessor(made.sampling_params.repetition_penalty)
        expected = reference(torch.tensor([made.all_token_ids]), logits[row : row + 1])
        torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-6, atol=1e-6)


def test_penalties_equal_the_definition_while_the_output_grows():
    """By hand in fp64, 150 tokens: over the first capacity of the counts."""
    vocab_size = 300
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, vocab_size, generator=generator)
    params = [
        SamplingParams(presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.5),
        SamplingParams(frequency_penalty=1.1),
    ]
    requests = [request(p, prompt=[5, 6, 6]) for p in params]
    state = state_of(requests, vocab_size)
    for _ in range(150):
        got = process_logits(logits, state.make_metadata())
        for row, made in enumerate(requests):
            p = made.sampling_params
            expected = logits[row].double()
            for token in set(made.all_token_ids):
                count = made.output_token_ids.count(token)
                value = expected[token]
                value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
                expected[token] = value - p.frequency_penalty * count - p.presence_penalty * (count > 0)
            torch.testing.assert_close(got[row].double(), expected, rtol=1e-6, atol=1e-5)
            made.all_token_ids.append(int(torch.randint(vocab_size, (), generator=generator)))


def test_penalties_change_the_distribution_exactly():
    logits = torch.randn(30, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(presence_penalty=1.0)
    changed = logits.double().clone()
    changed[0] -= 1.0
    requests_output_grows_by_token_zero = draws(logits, params, 20_000)
    first = draws(logits, params, 500)
    rest = requests_output_grows_by_token_zero - first
    assert_distributed(rest, exact(changed.tolist(), SamplingParams()))


def test_bias_allowed_and_banned():
    logits = torch.zeros(4, 12)
    requests = [
        request(SamplingParams(logit_bias={3: 2.5, 11: -100.0})),
        request(SamplingParams(allowed_token_ids=[2, 9])),
        request(SamplingParams(min_tokens=2, stop_token_ids=[4]), eos=7, output=[1]),
        request(SamplingParams(min_tokens=2, stop_token_ids=[4]), eos=7, output=[1, 1]),
    ]
    got = processed(logits, requests)
    expected = torch.zeros(4, 12)
    expected[0, 3], expected[0, 11] = 2.5, -100.0
    expected[1] = -torch.inf
    expected[1, [2, 9]] = 0
    expected[2, [4, 7]] = -torch.inf
    assert torch.equal(got, expected)


def test_bad_words_cannot_be_completed():
    params = SamplingParams(bad_words=["x"])
    params.bad_words_token_ids = [[5], [1, 2, 3]]
    requests = [request(params, prompt=[1, 2], output=output) for output in ([], [1, 2], [2], [0, 1, 2])]
    got = processed(torch.zeros(4, 8), requests)
    banned = [set(row.isinf().nonzero().flatten().tolist()) for row in got]
    assert banned == [{5}, {5, 3}, {5}, {5, 3}]


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, -1, 1000])
def test_logprobs_are_those_of_the_raw_logits(dtype, num_logprobs):
    """Over more rows than are worked on at once, with every kind of change to the logits; fp32 against fp64: 2e-6."""
    vocab_size, num_rows = 90, 150
    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(6)) * 3).to(dtype)
    params = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.5, logprobs=num_logprobs)
    got = sample(logits, [request(params) for _ in range(num_rows)])
    table = torch.log_softmax(logits.double(), dim=-1)
    ids, logprobs, ranks = got.logprobs_tensors
    width = vocab_size if num_logprobs in (-1, 1000) else num_logprobs
    assert ids.shape == logprobs.shape == (num_rows, width + 1)
    assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int32, torch.float32, torch.int32)
    assert torch.equal(ids[:, 0].long(), got.sampled_token_ids)
    torch.testing.assert_close(logprobs.double(), table.gather(1, ids.long()), rtol=0, atol=2e-6)
    torch.testing.assert_close(logprobs[:, 1:].double(), table.topk(width).values, rtol=0, atol=2e-6)
    for row in range(num_rows):
        chosen = logits[row, got.sampled_token_ids[row]]
        assert ranks[row] == 1 + sum(value > chosen for value in logits[row])


def test_the_batch_asks_for_the_most():
    rows = [request(SamplingParams(temperature=0, logprobs=n)) for n in (None, 0, 3)]
    state = state_of(rows, 9)
    assert state.make_metadata().max_num_logprobs == 3
    assert state.make_metadata([0]).max_num_logprobs is None
    rows.append(request(SamplingParams(logprobs=-1)))
    assert state_of(rows, 9).make_metadata().max_num_logprobs == -1


# --- rows of the batch ------------------------------------------------------------------------------------------------


def test_metadata_is_reused_until_a_row_changes():
    requests = [request(SamplingParams(temperature=0), name=str(i)) for i in range(3)]
    state = SamplingState(4, 50)
    for row, made in enumerate(requests):
        state.add_row(row, made)
    first = state.make_metadata()
    assert first.all_greedy
    assert state.make_metadata() is first
    state.add_row(3, request(SamplingParams(seed=1)))
    mixed = state.make_metadata()
    assert not mixed.all_greedy
    assert mixed.temperature.tolist() == [0, 0, 0, 1]
    assert state.make_metadata([0, 2]).all_greedy


def test_wrong_rows_are_refused():
    state = SamplingState(3, 10)
    state.add_row(1, request(SamplingParams()))
    with pytest.raises(AssertionError, match="not 0"):
        state.make_metadata()
    with pytest.raises(AssertionError, match=r"\[0\] are free"):
        state.make_metadata([0, 1])
    with pytest.raises(AssertionError, match="row 1 holds"):
        state.add_row(1, request(SamplingParams()))
    with pytest.raises(AssertionError, match="row 2 is free"):
        state.remove_row(2)


# --- what log-probabilities are of ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, logprobs=-1),
        SamplingParams(temperature=1.5, top_k=3, logprobs=-1),
        SamplingParams(temperature=0.8, top_p=0.6, min_p=0.1, logprobs=-1),
        SamplingParams(temperature=0, repetition_penalty=1.7, logit_bias={4: 2.0}, logprobs=-1),
        SamplingParams(temperature=1.2, presence_penalty=1.0, allowed_token_ids=[1, 2, 4, 6], logprobs=-1),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_modes(params, mode):
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(2, 8, generator=generator)
    # A plain greedy row beside it keeps its own values.
    rows = [request(params), request(SamplingParams(temperature=0, logprobs=-1))]
    metadata = state_of(rows, 8).make_metadata()
    got = Sampler(mode)(logits.clone(), metadata)
    raw = logits.double()
    processed = process_logits(logits, metadata).double() if metadata.changes_logits else raw.clone()
    if params.temperature:
        processed[0] /= params.temperature
        kept = torch.tensor(exact(processed[0].tolist(), params_at_one(params))) > 0
        processed[0, ~kept] = -math.inf
    shown = processed if mode.startswith("processed") else raw
    expected = shown.log_softmax(-1) if mode.endswith("logprobs") else shown
    ids, values, ranks = got.logprobs_tensors
    for row in range(2):
        assert values[row].double() == pytest.approx(expected[row, ids[row].long()].numpy(), abs=1e-5), mode
        chosen = expected[row, got.sampled_token_ids[row]]
        assert chosen > -math.inf or mode.startswith("raw")
        assert ranks[row] == 1 + int((expected[row] > chosen + 1e-9).sum())


def params_at_one(params: SamplingParams) -> SamplingParams:
    """The filters alone."""
    return SamplingParams(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


# --- devices without fp64 ---------------------------------------------------------------------------------------------


def test_the_distribution_is_exact_without_fp64(monkeypatch):
    """Sums and noise in fp32; the largest noise is still below 1."""
    vocab_size, num_draws = 300, 20000
    monkeypatch.setattr(reference_sampling, "_real", lambda x: torch.float32)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=200)
    metadata = state_of([request(params) for _ in range(num_draws)], vocab_size).make_metadata()
    assert metadata.top_p.dtype == torch.float32
    tokens = Sampler()(logits.expand(num_draws, -1), metadata).sampled_token_ids
    assert_distributed(np.bincount(tokens, minlength=vocab_size), exact(logits[0].tolist(), params))
    monkeypatch.setattr(reference_sampling, "random_bits", lambda seeds, _: 0 * seeds - 1)
    for real in (torch.float32, torch.float64):
        assert uniform_noise(metadata.seeds, metadata.positions, real).max() < 1
