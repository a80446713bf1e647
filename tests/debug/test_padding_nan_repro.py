# SPDX-License-Identifier: Apache-2.0
"""The repro prints what is documented, and its exit code notices when the code as shipped is no longer right."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_checks
import torch
import torch.nn.functional as F
from padding_slots import slots

SCRIPT = Path(__file__).parents[2] / "examples" / "padding_nan_repro.py"


def test_every_fault_is_a_bug_and_everything_shipped_is_right() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    faults = [line for line in done.stdout.splitlines() if "fault put back:" in line]
    shipped = [line for line in done.stdout.splitlines() if "as shipped:" in line]
    assert len(faults) == len(shipped) == 9
    assert all(line.endswith(" OK") for line in shipped)
    assert [line.split()[-1] for line in faults].count("BUG") == 8
    assert faults[2].endswith("no pad rows OK"), "without DP padding the same fault hurts nobody"
    for part in (
        "NaN in rows [26, 27, 28, 29] BUG",
        "num_actual_tokens=30 actual_nan_rows=4 padding_nan_rows=0 BUG",
        "decode of clean input NaN for request [3], NaN in state slot [4] BUG",
        "decode of clean input wrong for request [3] BUG",
        "pad rows choose experts [0, 0]",
        "amax=nan padding_nan=True real row lost BUG",
        "padding_nan=False real row kept OK",
        "seq_len 1, 32 of 32 channels NaN BUG",
    ):
        assert part in done.stdout
    of_mla = re.findall(r"^MLA decode.*: (.*)\n(fix OFF .*)\n(fix ON .*)$", done.stdout, re.M)
    assert [case for case, *_ in of_mla] == ["1 real + 127 pad rows", "3 real + 1 pad row", "all idle"]
    for case, off, on in of_mla:
        assert off == "fix OFF amax=nan padding_nan=True"
        assert re.fullmatch(r"fix ON amax=\d+\.\d{4} padding_nan=False", on)
        assert (float(on.split("amax=")[1].split()[0]) == 0) is (case == "all idle")


@pytest.fixture
def repro(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_PAGED")
    spec = importlib.util.spec_from_file_location("padding_nan_repro", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leave_tail(repro: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repro.attention, "zero_padding_rows", lambda output, slot_mapping: None)
    patch.setattr(repro.ops, "paged_attention", rank_checks.of_real_rows(repro.ops.paged_attention))


def accept_any_count(repro: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repro.CommonAttentionMetadata, "__post_init__", lambda self: None)


def route_padding(repro: Any, patch: pytest.MonkeyPatch) -> None:
    select = repro.ops.topk_softmax
    patch.setattr(repro.ops, "topk_softmax", lambda logits, k, norm, slots: select(logits, k, norm, slots.abs()))


def walk_on(repro: Any, patch: pytest.MonkeyPatch) -> None:
    honest = repro.ops.gated_delta_net

    def walks(x: torch.Tensor, weights: Any, conv: Any, state: Any, starts: torch.Tensor, slots: Any) -> torch.Tensor:
        return honest(x, weights, conv, state, torch.where(starts == starts[-1], len(x), starts), slots)

    patch.setattr(repro.ops, "gated_delta_net", walks)


def leave_latent_rows(repro: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(repro.mla, "zero_padding_rows", lambda output, slot_mapping: None)


def multiply_with_weight_0(repro: Any, patch: pytest.MonkeyPatch) -> None:
    """Attention over whole tiles of slots, as one product with weights that are 0 past the context's end."""

    def over_tiles(q: Any, keys: Any, values: Any, table: Any, starts: Any, lens: Any, scale: float, out: Any, *_: Any,
                   **__: Any) -> None:  # fmt: skip
        for r, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
            k, v = (x[table[r].long(), 0].flatten(0, 1) for x in (keys, values))
            past = torch.arange(len(k)) >= lens[r]
            weights = (q[first:last] @ k.T * scale).masked_fill(past, -torch.inf).softmax(-1)
            out[first:last] = weights @ v

    patch.setattr(repro.mla.ops, "paged_attention", over_tiles)


@pytest.mark.parametrize(
    "damage", [leave_tail, accept_any_count, route_padding, walk_on, leave_latent_rows, multiply_with_weight_0]
)
def test_damage_is_noticed(
    repro: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: Callable[..., None]
) -> None:
    damage(repro, monkeypatch)
    assert repro.main() == 1
    assert "NOT AS EXPECTED" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_before_a_projection_fills_its_row(dtype: torch.dtype) -> None:
    """One NaN channel of 64 before an output projection: its row is NaN in all 2048 columns, no other row in any."""
    x, weight = torch.randn(4, 64, dtype=dtype), torch.randn(2048, 64, dtype=dtype)
    x[2, 17] = float("nan")
    out = F.linear(x, weight)
    assert out.isnan().sum(1).tolist() == [0, 0, 2048, 0]


def test_a_nan_gate_wins_over_a_zero_output(repro: Any) -> None:
    """Zeroing the delta net's output is not enough while its gate is what memory held."""
    zeroed, gate = torch.zeros(4, 4, 16), torch.ones(4, 4, 16)
    gate[3] = float("nan")
    out = repro.reference_gdn.rms_norm_gated_ref(zeroed, gate, repro.WEIGHTS.norm_weight_E, 1e-6)
    assert out.isnan().flatten(1).all(1).tolist() == [False, False, False, True]


def test_a_nan_row_reaches_another_by_an_expert_chosen_twice(repro: Any, nan_poison: None) -> None:
    """The B60 decode: row 2 of 4 is NaN after a layer's attention, rows 0 and 2 after its MoE. Top-k that repeats an
    expert and groups sized by distinct choices do that; distinct choices, and this engine's experts, do not."""
    x, logits = torch.randn(4, repro.HIDDEN), torch.full((4, repro.EXPERTS), -4.0)
    for row, experts in enumerate(((1, 3), (4, 5), (6, 7), (2, 5))):
        logits[row, list(experts)] = torch.tensor([2.0, 1.0])
    x[2], logits[2] = float("nan"), float("nan")
    weights, ids = repro.ops.topk_softmax(logits, repro.TOP_K, True, slots(4, 4))
    repeated = repro.scanning_top_k(logits)
    assert repeated[2].tolist() == [0, 0]
    assert repro.nan_rows(repro.experts_by_group(x, repeated, weights)) == [0, 2]
    assert repro.nan_rows(repro.experts_by_group(x, ids, weights)) == [2]
    packed = repro.ops.pack_expert_weights(repro.W13, gated=True), repro.ops.pack_expert_weights(repro.W2)
    for choice in (ids, repeated):
        assert repro.nan_rows(repro.ops.fused_experts(x, *packed, choice, weights)) == [2]
