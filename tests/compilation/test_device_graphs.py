# SPDX-License-Identifier: Apache-2.0
"""Steps captured as a device's graphs, on a device that is late (``late_device.py``) and has such graphs."""

from __future__ import annotations

from typing import Any

import late_device
import pytest
import tiny_models as tiny

PROMPTS = [tiny.prompt(n) for n in (9, 3, 17)]


def run(monkeypatch: pytest.MonkeyPatch, model: str = "qwen3", tokens: int = 24, **options: Any) -> Any:
    """(tokens of each prompt, replays, rows → captured step)."""
    options = {"max_num_seqs": 4, "cudagraph_capture_sizes": [1, 2, 4], **options}
    with late_device.stand_in(monkeypatch, graphs=True) as device:
        llm = tiny.make_llm(model, **options)
        steps, replays = dict(llm.llm_engine.worker.runner.graphs.steps), device.replays
        found = tiny.tokens(tiny.generate(llm, PROMPTS, tokens))
        replays = device.replays - replays
        llm.shutdown()
    return found, replays, steps


def expected(model: str = "qwen3", tokens: int = 24) -> list[tuple[int, ...]]:
    return [tiny.greedy(model, prompt, tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_decodes_are_replayed_and_right(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Lengths grow over block boundaries, and rows fall from 3 to 1 as requests end."""
    found, replays, steps = run(monkeypatch, model)
    assert found == expected(model)
    assert sorted(steps) == [1, 2, 4]
    assert replays == 23
    assert {step.num_pieces for step in steps.values()} == {1}
