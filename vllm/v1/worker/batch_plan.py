# SPDX-License-Identifier: Apache-2.0
"""The one record that says how large a step is: on this rank, padded, and across the DP ranks."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.worker.dp_utils import DPAgreement


@dataclass(frozen=True)
class BatchPlan:
    """A step's sizes, decided once and read by everything after.

    ``num_tokens_unpadded`` real rows are followed by padding up to ``num_tokens_padded``; ``num_reqs_unpadded`` real
    requests by pad requests of length 0 up to ``num_reqs_padded``. The counts across DP are those that all ranks agreed
    on in this step, in DP rank order.
    """

    step: int
    num_reqs_unpadded: int
    num_reqs_padded: int
    num_tokens_unpadded: int
    num_tokens_padded: int
    num_tokens_unpadded_across_dp: tuple[int, ...]
    num_tokens_padded_across_dp: tuple[int, ...]
    dp_rank: int = 0
    cudagraph_mode: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.num_tokens_unpadded <= self.num_tokens_padded, (
            f"{self.num_tokens_unpadded} real rows in {self.num_tokens_padded} padded ones"
        )
        assert 0 <= self.num_reqs_unpadded <= self.num_reqs_padded, (
            f"{self.num_reqs_unpadded} real requests in {self.num_reqs_padded} padded ones"
        )

    @property
    def is_dummy(self) -> bool:
        """Every row is padding: this rank only keeps the others company."""
        return self.num_tokens_unpadded == 0

    @staticmethod
    def make(agreement: DPAgreement, num_reqs_unpadded: int, num_reqs_captured: int = 1) -> BatchPlan:
        """The plan that follows from the ranks' agreement. A dummy step carries one pad request, a captured one as many
        as it was captured with."""
        return BatchPlan(
            step=agreement.step,
            num_reqs_unpadded=num_reqs_unpadded,
            num_reqs_padded=max(num_reqs_unpadded, num_reqs_captured if agreement.cudagraph_mode > 0 else 1),
            num_tokens_unpadded=agreement.num_tokens_unpadded,
            num_tokens_padded=agreement.num_tokens_padded,
            num_tokens_unpadded_across_dp=agreement.num_tokens_unpadded_across_dp,
            num_tokens_padded_across_dp=agreement.num_tokens_padded_across_dp,
            dp_rank=agreement.dp_rank,
            cudagraph_mode=max(agreement.cudagraph_mode, 0),
        )
