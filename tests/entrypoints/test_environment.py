# SPDX-License-Identifier: Apache-2.0
"""Environment variables: which are read, what is said of those that are not, and that no value breaks the import."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm import envs
from vllm.engine.arg_utils import EngineArgs, warn_of_unread

ROOT = Path(__file__).parents[2]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> Iterator[Callable[..., list[str]]]:
    """``told(NAME="value", …)``: the lines that the start says of an environment with these variables."""

    def lines(**variables: str) -> list[str]:
        log.clear()
        warn_of_unread.cache_clear()
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("VLLM_") or name in ("RANK", "WORLD_SIZE")]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            warn_of_unread()
            warn_of_unread()
        return [record.getMessage() for record in log.records]

    yield lines
    warn_of_unread.cache_clear()


def test_unread_variables_are_told_in_one_line(told):
    assert told(VLLM_FOO="hush", VLLM_KERNEL="cpu", VLLM_KERNELS="cpu", VLLM_BATCH_INVARIANT="1") == [
        "no part of this engine reads VLLM_BATCH_INVARIANT, VLLM_FOO, VLLM_KERNEL (did you mean VLLM_KERNELS?)"
    ]
    assert told(VLLM_FOO="1", RANK="0", WORLD_SIZE="2")
    assert not told(VLLM_FOO="1", RANK="1", WORLD_SIZE="2"), "one line, not one for each rank"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        dict.fromkeys(envs.VARIABLES, "1"),
        {"VLLM_USE_V1": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
        {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "false", "VLLM_ROCM_USE_AITER": "1"},
        {"VLLM_PORT": "tcp://10.0.0.1:8000", "VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT_8000_TCP": "x"},
        {"PATH": os.environ["PATH"], "NOT_VLLM_FOO": "1"},
    ],
)
def test_variables_that_ask_for_nothing_are_not_told(told, variables):
    assert told(**variables) == []


def test_variables_that_ask_for_something_are_told(told):
    for name in (
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_RAY_SPMD_WORKER",
        "VLLM_PLUGINS",
        "VLLM_FUSED_MOE_CHUNK_SIZE",
        "VLLM_LOGGING_PREFIX",
    ):
        assert told(**{name: "1"}) == [f"no part of this engine reads {name}"]


def test_the_start_of_an_engine_tells(told, tiny_llama, monkeypatch, log):
    told()
    warn_of_unread.cache_clear()
    monkeypatch.setenv("VLLM_FOO", "1")
    EngineArgs(str(tiny_llama)).create_engine_config()
    assert "VLLM_FOO" in log.text


def test_every_variable_that_the_code_reads_is_in_the_table():
    """Else the start would say of it that nothing reads it."""
    reads = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[)|envs\.)\s*["']?(VLLM_[A-Z0-9_]+)""")
    files = [path for kind in ("*.py", "*.cpp", "*.h") for path in (ROOT / "vllm").rglob(kind)]
    found = {name: path for path in files for name in reads.findall(path.read_text())}
    assert len(found) > 10
    assert not {name: path for name, path in found.items() if name not in envs.VARIABLES}


@pytest.mark.parametrize(
    ("text", "level", "warns"),
    [
        (None, logging.INFO, False),
        ("", logging.INFO, False),
        ("10", logging.DEBUG, False),
        ("debug", logging.DEBUG, False),
        ("Warn", logging.WARNING, False),
        ("TRACE", 1, False),
        ("banana", logging.INFO, True),
        ("-5", logging.INFO, True),
    ],
)
def test_no_log_level_breaks_the_import(text, level, warns):
    code = "import logging, vllm.logger as l; l.init_logger('vllm.x'); print(logging.getLogger('vllm').level)"
    env = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    env |= {} if text is None else {"VLLM_LOGGING_LEVEL": text}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, str(level)), run.stderr
    assert ("VLLM_LOGGING_LEVEL" in run.stderr) == warns


def test_logging_may_be_left_to_the_caller():
    code = "import logging, vllm.logger as l; l.init_logger('vllm.x'); print(logging.getLogger('vllm').handlers)"
    env = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    assert out.stdout.strip() == "[]"
