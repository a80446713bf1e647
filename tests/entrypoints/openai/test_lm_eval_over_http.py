# SPDX-License-Identifier: Apache-2.0
"""lm-eval's ``local-completions`` and ``local-chat-completions``, unchanged, give what its ``hf`` backend gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_server import Server
from test_lm_eval import TOLERANCE, responses
from test_lm_eval import tasks as _tasks

pytest.importorskip("tenacity", reason="lm-eval's clients of servers are not installed: pip install 'lm-eval[api]'")


@pytest.fixture(scope="module")
def model(char_llama: Path) -> Path:
    return char_llama


tasks = _tasks  # the fixture, over the model above


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def evaluate(backend: str, model_args: dict[str, Any], of: list[dict[str, Any]], chat: bool = False) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=backend,
        model_args=model_args,
        tasks=of,
        limit=8,
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )


def hf(folder: Path) -> dict[str, Any]:
    return {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "batch_size": 1}


def test_completions(server: Server, char_llama: Path, tasks: list[dict[str, Any]]):
    right = evaluate("hf", hf(char_llama), tasks[:2])
    arguments = {
        "model": "chars",
        "base_url": server.url + "/v1/completions",
        "tokenizer": str(char_llama),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 3,
        "batch_size": 4,
        "max_length": 512,
    }
    ours = evaluate("local-completions", arguments, tasks[:2])
    expected, given = (responses(results, "local_choice") for results in (right, ours))
    assert [float(r[0]) for r in given] == pytest.approx([float(r[0]) for r in expected], abs=TOLERANCE)
    assert [r[1] for r in given] == [r[1] for r in expected], "whether the choice is what the model would write"
    assert responses(ours, "local_generate") == responses(right, "local_generate")
    assert ours["results"]["local_choice"]["acc,none"] == right["results"]["local_choice"]["acc,none"]


def test_chats(server: Server, char_llama: Path, tasks: list[dict[str, Any]]):
    right = evaluate("hf", hf(char_llama), tasks[1:2], chat=True)
    arguments = {"model": "chars", "base_url": server.url + "/v1/chat/completions", "num_concurrent": 3}
    ours = evaluate("local-chat-completions", arguments, tasks[1:2], chat=True)
    assert responses(ours, "local_generate") == responses(right, "local_generate")
