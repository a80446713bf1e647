# SPDX-License-Identifier: Apache-2.0
"""The kind of fault: one call writes a step's inputs otherwise than the operations that it stands for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.kernels.cpu.ops import kernels_available
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.state import SamplingState
from vllm.v1.worker.batch_plan import BatchPlan
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.host_inputs import HostInputs
from vllm.v1.worker.input_buffers import InputBuffers, LastSampled

pytestmark = pytest.mark.skipif(not kernels_available(), reason="the C++ kernels cannot be built here")

ROWS, LENGTH, BLOCK, TOKENS = 6, 48, 4, 64


class Requests:
    """A batch of them, and two runners that write its steps' inputs: by one call, and by numpy."""

    def __init__(self, given_tokens: list[int], order: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.batch = InputBatch(ROWS, LENGTH, BLOCK, SamplingState(ROWS, 1000))
        made = []
        for name, count in enumerate(given_tokens):
            request = Request(str(name), rng.integers(1, 1000, count).tolist(), SamplingParams(max_tokens=8))
            request.state_slot = int(rng.integers(-1, 9))
            self.batch.add(request, rng.integers(1, 99, LENGTH // BLOCK).tolist())
            made.append(request)
        self.requests = [made[i] for i in order]
        self.last = LastSampled(ROWS, torch.device("cpu"))
        self.last.on_host[:] = rng.integers(1, 1000, ROWS)
        self.by_call, self.by_numpy = self._runner(), self._runner()
        self.by_call.host_inputs = HostInputs(self.batch, self.by_call.buffers, self.last)

    def _runner(self) -> Any:
        runner = GPUModelRunner.__new__(GPUModelRunner)
        runner.input_batch, runner.last_sampled, runner.is_host = self.batch, self.last, True
        runner.buffers = InputBuffers(TOKENS, ROWS, LENGTH // BLOCK, torch.device("cpu"))
        runner.host_inputs = runner._kept_inputs = None
        runner.graphs = SimpleNamespace(decode_only=False)
        runner.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LENGTH))
        return runner

    def check(self, computed: list[int], counts: list[int], samples: list[bool], pad: int, mode: CUDAGraphMode) -> None:
        requests = self.requests[: len(counts)]
        step = SchedulerOutput(requests, counts, [[] for _ in counts], computed, samples)
        num_tokens = sum(counts)
        num_padded = min(num_tokens + pad, TOKENS)
        num_reqs = min(len(counts) + pad, ROWS)
        plan = BatchPlan(
            0, len(counts), num_reqs, num_tokens, num_padded, (num_tokens,), (num_padded,), cudagraph_mode=mode
        )
        found, expected = (self._inputs(runner, step, plan) for runner in (self.by_call, self.by_numpy))
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(found[name], x), f"{name}: {found[name].tolist()}, by numpy {x.tolist()}"

    def _inputs(self, runner: Any, step: SchedulerOutput, plan: BatchPlan) -> dict[str, torch.Tensor]:
        """Every tensor, of which what is not written holds a value that no batch has."""
        runner.buffers.overwrite()
        inputs = runner._prepare_inputs(step, plan)
        if inputs.reads_sampled:
            self.last.fill_in(inputs.input_ids)
        common = inputs.common
        if plan.cudagraph_mode == CUDAGraphMode.FULL:
            assert (common.max_query_len, common.max_seq_len) == (plan.num_tokens_padded, LENGTH)
        read = {"input_ids": inputs.input_ids, "positions": inputs.positions, "sampled_rows": inputs.sampled_rows}
        read |= {name: x for name, x in vars(common).items() if isinstance(x, torch.Tensor)}
        if inputs.logits_rows is not None:
            read["logits_rows"] = inputs.logits_rows
        return {name: x.clone() for name, x in read.items()}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_call_writes_what_numpy_does(data: st.DataObject) -> None:
    draw, number = data.draw, st.integers
    given_tokens = draw(st.lists(number(1, LENGTH - 8), min_size=1, max_size=ROWS))
    everyone = Requests(given_tokens, draw(st.permutations(range(len(given_tokens)))), draw(number(0, 2**31)))
    for _ in range(draw(number(1, 3))):  # the later ones over what the first one left
        is_decode = draw(st.booleans())
        counts = draw(st.lists(number(1, 1 if is_decode else 9), max_size=len(given_tokens)))
        most = [LENGTH - count for count in counts]
        computed = [draw(number(0, limit)) for limit in most]
        samples = [is_decode or draw(st.booleans()) for _ in counts]
        mode = draw(st.sampled_from([CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]))
        pad = draw(number(0 if counts else 1, 5))
        everyone.check(computed, counts, samples, pad, mode)
        if all(end < LENGTH for end in map(sum, zip(computed, counts, strict=True))):
            everyone.check([c + 1 for c in computed], counts, samples, pad, mode)  # the same layout again
            everyone.check(computed, counts, samples, pad + 1, mode)


def test_a_kept_step_is_of_its_size_and_requests() -> None:
    batch = Requests([3, 5, 7], [2, 0, 1], 1)
    full = CUDAGraphMode.FULL
    for computed, pad in (([7, 3, 5], 1), ([8, 4, 6], 1), ([9, 5, 7], 3), ([10, 6], 2), ([11, 7, 8], 1)):
        batch.check(computed, [1] * len(computed), [True] * len(computed), pad, full)


def test_what_does_not_fit_is_refused() -> None:
    everyone = Requests([3, 5], [0, 1], 1)
    with pytest.raises(AssertionError, match=rf"\[3, {LENGTH}\] tokens run \[1, 1\], past {LENGTH}"):
        everyone.check([3, LENGTH], [1, 1], [True, True], 0, CUDAGraphMode.FULL)
    layout = everyone.batch.layout(SchedulerOutput(everyone.requests, [1, 1], [[], []], [3, 5], [True, True]))
    for num_reqs, num_tokens in ((1, 2), (2, 1), (ROWS + 1, 2), (2, TOKENS + 1)):
        with pytest.raises(AssertionError, match="padded to"):
            everyone.by_call.host_inputs.write(layout, num_reqs, num_tokens, [3, 5])
