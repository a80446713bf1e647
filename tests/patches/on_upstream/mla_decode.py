# SPDX-License-Identifier: Apache-2.0
"""Upstream's Triton MLA decode, second stage, on CPU in Triton's interpreter. One line of JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import torch
import triton
import triton.language as tl

# Harness: upstream imports Triton through a module that hides it where the CPU has no compiler for it.
stand_in = types.ModuleType("vllm.triton_utils")
stand_in.triton, stand_in.tl, stand_in.HAS_TRITON = triton, tl, True


def main() -> None:
    import vllm.platforms  # noqa: F401

    sys.modules["vllm.triton_utils"] = stand_in
    module = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention")
    lengths = torch.tensor([5, 0, 3], dtype=torch.int32)
    batch, heads, splits, width = 3, 2, 2, 16
    torch.manual_seed(0)
    # What the first stage leaves: for each split the partial output and, last, its log-sum-exp. The parts of the
    # empty sequence are stale.
    partial = torch.randn(batch, heads, splits, width + 1)
    partial[1] = float("nan")
    out = torch.full((batch, heads, width), 7.0)
    lse = torch.full((batch, heads), 7.0)
    names = module._fwd_kernel_stage2.arg_names
    strides = [*partial.stride()[:3], *out.stride()[:2], lse.stride(0)]
    arguments = dict(zip(names, [partial, out, lse, lengths, *strides, splits, width, width], strict=False))
    module._fwd_kernel_stage2[(batch, heads)](**arguments)

    def by_hand(row: int) -> torch.Tensor:
        scores = partial[row, :, :, width].softmax(-1)
        return (scores[..., None] * partial[row, :, :, :width]).sum(1)

    others = all(torch.allclose(out[row], by_hand(row), rtol=1e-5, atol=1e-6) for row in (0, 2))
    empty = "nan" if out[1].isnan().all() else "zero" if out[1].eq(0).all() else "stale"
    log_sum = "-inf" if lse[1].eq(float("-inf")).all() else str(lse[1].tolist())
    print("CASES " + json.dumps({"empty": empty, "empty lse": log_sum, "others": "as by hand" if others else "wrong"}))


if __name__ == "__main__":
    main()
