# SPDX-License-Identifier: Apache-2.0
"""The agreement of the DP ranks: its rules on random votes, and its one reduction a step on real ranks."""

from __future__ import annotations

import random

import launcher
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_checks import observed, own_rank, own_world

from vllm.config import CompilationConfig
from vllm.distributed import (
    CollectiveError,
    destroy_distributed_environment,
    get_dp_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.platforms import POLICIES
from vllm.v1.worker.dp_utils import (
    CAPTURE,
    DPAgreement,
    DPVote,
    LockstepError,
    agree,
    agree_alone,
    coordinate_batch_across_dp,
    pads_to_max,
)

BUCKETS = CompilationConfig(cudagraph_capture_sizes=(1, 2, 4, 8, 16, 64)).padded_size


def _vote(
    unpadded: int, padded: int | None = None, mode: int = 0, live: int = 1, step: int = 7, pad: int = 0
) -> DPVote:
    return DPVote(unpadded, unpadded if padded is None else padded, mode, live, step, pad)


def _padded(votes: list[DPVote], bucket: bool = False) -> tuple[int, ...]:
    return agree(votes, 0, BUCKETS if bucket else None).num_tokens_padded_across_dp


# -- rules


def test_the_b60_case() -> None:
    votes = [_vote(26), _vote(30)]
    assert _padded(votes) == (26, 30)
    assert _padded([vote._replace(pad_to_max=1) for vote in votes]) == (30, 30)  # fix 1
    agreed = agree(votes, 1)
    assert (agreed.num_tokens_unpadded, agreed.num_tokens_padded, agreed.is_dummy) == (30, 30, False)


def test_an_idle_rank_runs_a_dummy_while_another_works() -> None:
    agreed = agree([_vote(0, live=0), _vote(9)], 0)
    assert agreed.num_tokens_padded_across_dp == (1, 9)
    assert agreed.should_run
    assert agreed.is_dummy
    assert agreed.any_unfinished
    assert _padded([_vote(0, pad=1), _vote(9, pad=1)]) == (9, 9)


def test_nobody_runs_when_nobody_has_tokens() -> None:
    for pad in (0, 1):
        agreed = agree([_vote(0, live=0, pad=pad, mode=2), _vote(0, live=1, pad=pad, mode=2)], 0, BUCKETS)
        assert agreed.num_tokens_padded_across_dp == (0, 0)
        assert not agreed.should_run
        assert not agreed.is_dummy
        assert agreed.any_unfinished  # a starved rank still holds its request
    assert not agree([_vote(0, live=0)] * 2, 0).any_unfinished


def test_case_2_the_idle_ranks_graph_is_chosen_by_the_agreed_count() -> None:
    assert _padded([_vote(3, mode=2), _vote(0, mode=2)], bucket=True) == (4, 4)


def test_one_rank_without_a_graph_makes_all_eager() -> None:
    agreed = agree([_vote(3, mode=2), _vote(100, mode=0)], 0, BUCKETS)
    assert agreed.cudagraph_mode == 0
    assert agreed.num_tokens_padded_across_dp == (3, 100)


def test_different_steps_name_the_ranks_behind() -> None:
    with pytest.raises(LockstepError, match=r"\[7, 6, 7\] by DP rank; behind step 7: \{1: 6\}"):
        agree([_vote(1), _vote(1, step=6), _vote(1)], 0)


def test_different_policies_are_refused() -> None:
    with pytest.raises(LockstepError, match=r"different padding policies: \[0, 1\]"):
        agree([_vote(1), _vote(1, pad=1)], 0)


def test_policy_applies_only_where_ranks_exchange_tokens() -> None:
    assert pads_to_max(POLICIES["xpu"], True, 2)
    assert not pads_to_max(POLICIES["xpu"], False, 2)
    assert not pads_to_max(POLICIES["xpu"], True, 1)
    assert not pads_to_max(POLICIES["cpu"], True, 2)


def test_ranks_leave_only_where_all_vote_to() -> None:
    for votes in ((0, 0), (1, 0), (1, 1)):
        for rank in (0, 1):
            agreed = agree([_vote(0, live=0)._replace(stopping=vote) for vote in votes], rank)
            assert agreed.all_stopping is all(votes)


@st.composite
def _ballots(draw: st.DrawFn) -> list[DPVote]:
    pad = draw(st.integers(0, 1))
    votes = []
    for _ in range(draw(st.integers(1, 8))):
        unpadded = draw(st.one_of(st.just(0), st.integers(0, 64)))
        votes.append(
            DPVote(
                unpadded,
                min(unpadded + draw(st.integers(0, 3)), 64) if unpadded else 0,
                draw(st.integers(0, 2)),
                int(unpadded > 0 or draw(st.booleans())),
                3,
                pad,
            )
        )
    return votes


@given(_ballots(), st.booleans(), st.booleans(), st.sampled_from([CAPTURE, 0, 1, 2]))
def test_a_rank_alone_decides_what_a_vote_of_one_does(
    votes: list[DPVote], with_buckets: bool, stopping: bool, mode: int
) -> None:
    vote, bucket = votes[0]._replace(cudagraph_mode=mode, stopping=int(stopping)), BUCKETS if with_buckets else None
    alone = agree_alone(
        vote.num_tokens_unpadded,
        vote.num_tokens_padded,
        mode,
        bool(vote.has_unfinished),
        vote.step,
        stopping,
        bucket,
    )
    assert alone == agree([vote], 0, bucket)


@given(_ballots(), st.booleans())
def test_rules_on_random_votes(votes: list[DPVote], with_buckets: bool) -> None:
    bucket = BUCKETS if with_buckets else None
    agreements = [agree(votes, rank, bucket) for rank in range(len(votes))]
    assert len({agreed._replace(dp_rank=0) for agreed in agreements}) == 1  # all ranks decide alike
    agreed: DPAgreement = agreements[0]
    rows = agreed.num_tokens_padded_across_dp
    assert agreed.num_tokens_unpadded_across_dp == tuple(vote.num_tokens_unpadded for vote in votes)
    assert len({own.should_run for own in agreements}) == 1  # all run, or none does
    assert agreed.should_run == any(vote.num_tokens_unpadded for vote in votes)
    assert agreed.any_unfinished == any(vote.has_unfinished for vote in votes)
    assert all(agreed.cudagraph_mode <= vote.cudagraph_mode for vote in votes)
    if not agreed.should_run:
        assert set(rows) == {0}
        return
    assert all(count >= max(vote.num_tokens_padded, 1) for count, vote in zip(rows, votes, strict=True))
    if agreed.cudagraph_mode > 0 or votes[0].pad_to_max:
        assert len(set(rows)) == 1
    else:
        assert rows == tuple(max(vote.num_tokens_padded, 1) for vote in votes)
    if agreed.cudagraph_mode > 0 and with_buckets:
        assert rows[0] == BUCKETS(rows[0])


# -- on ranks


def _load(dp_rank: int, step: int) -> int:
    return random.Random(100 * step + dp_rank).choice([0, 0, 1, 9, 200])


def _steps(tp: int, num_steps: int) -> list[DPAgreement]:
    init_distributed_environment()
    initialize_model_parallel(tp, own_world() // tp, True)
    group, agreements = get_dp_group(), []
    with observed(0.05) as ledger:
        for step in range(num_steps):
            tokens = _load(group.rank_in_group, step)
            agreements.append(coordinate_batch_across_dp(tokens, step=step, has_unfinished=step < num_steps - 1))
    # One reduction a step, and one over TP where there are TP ranks to compare.
    ops = [("compare_work_across_tp", ("int32",), "tp")] * (tp > 1) + [("coordinate_batch_across_dp", ("int32",), "dp")]
    assert [(r.op, r.dtypes, r.group[:2]) for r in ledger.records] == ops * num_steps
    return agreements


@pytest.mark.multiprocess
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_agree_in_every_step_under_delays(tp: int) -> None:
    results = launcher.run_ranks(_steps, 4, tp, 20, poison=True)
    dp = 4 // tp
    for step in range(20):
        tokens = tuple(_load(d, step) for d in range(dp))
        expected = tuple(max(n, 1) for n in tokens) if any(tokens) else (0,) * dp
        for rank, agreements in enumerate(results):
            assert agreements[step] == DPAgreement(tokens, expected, 0, step < 19, step, rank // tp)


def _out_of_step() -> str:
    init_distributed_environment()
    initialize_model_parallel(1, own_world())
    coordinate_batch_across_dp(1, step=0, has_unfinished=True)
    step = 2 if own_rank() == 1 else 1
    with pytest.raises(LockstepError) as caught:
        coordinate_batch_across_dp(1, step=step, has_unfinished=True)
    return str(caught.value)


@pytest.mark.multiprocess
def test_a_rank_out_of_step_is_an_error_on_every_rank() -> None:
    messages = launcher.run_ranks(_out_of_step, 4)
    assert len(set(messages)) == 1
    assert "[1, 2, 1, 1] by DP rank; behind step 2: {0: 1, 2: 1, 3: 1}" in messages[0]


def _skips_the_sync() -> str:
    """Case 1's fault: a rank that scheduled nothing stays away from the step's reduction."""
    init_distributed_environment()
    initialize_model_parallel(1, 2)
    if own_rank() == 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        coordinate_batch_across_dp(5, step=0, has_unfinished=True)
    return str(caught.value)


@pytest.mark.multiprocess
def test_case_1_put_back_a_rank_that_skips_the_sync_times_out() -> None:
    message = launcher.run_ranks(_skips_the_sync, 2, env={"VLLM_COLLECTIVE_TIMEOUT_S": "6"})[0]
    assert "rank 0: collective coordinate_batch_across_dp #0" in message


def test_one_dp_rank_needs_no_collective() -> None:
    init_distributed_environment()
    initialize_model_parallel()
    try:
        with observed() as ledger:
            agreed = coordinate_batch_across_dp(5, step=3, has_unfinished=True, cudagraph_mode=2, bucket=BUCKETS)
        assert agreed == DPAgreement((5,), (8,), 2, True, 3, 0)
        assert ledger.records == []
        assert torch.distributed.is_initialized() is False
    finally:
        destroy_distributed_environment()
