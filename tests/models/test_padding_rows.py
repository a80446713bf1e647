# SPDX-License-Identifier: Apache-2.0
"""Rows of no request, where the attention of a device leaves them as memory held them: the layer sets them to 0."""

from __future__ import annotations

import pytest
import rank_checks
import tiny_models as tiny
import torch
from test_step import runner_of

from vllm.kernels import ops


def test_rows_that_an_operator_leaves_are_zeroed_by_the_layer(
    monkeypatch: pytest.MonkeyPatch, nan_poison: None
) -> None:
    monkeypatch.setattr(ops, "paged_attention", rank_checks.of_real_rows(ops.paged_attention))
    llm = tiny.make_llm("llama-rope", max_num_batched_tokens=64, compilation_config={"cudagraph_capture_sizes": [8]})
    seen: list[torch.Tensor] = []
    attention = runner_of(llm).model.model.layers[0].self_attn.attn
    attention.register_forward_hook(lambda _, args, output: seen.append(output.clone()))
    outputs = tiny.generate(llm, [tiny.prompt(5)], 3)
    llm.shutdown()
    assert tiny.tokens(outputs) == [tiny.greedy("llama-rope", tiny.prompt(5), 3)]
    assert [x.shape[0] for x in seen] == [8, 8, 8]
    for x, real in zip(seen, (5, 1, 1), strict=True):
        assert (x[:real] != 0).any()
        assert (x[real:] == 0).all()
