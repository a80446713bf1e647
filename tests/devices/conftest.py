# SPDX-License-Identifier: Apache-2.0
"""The device suite: its device, its memory of NaN, and the report that is written when its tests have run."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Iterator

import device_report
import device_suite as suite
import pytest
import torch

_began = time.monotonic()
HANG_S = 300.0


@pytest.fixture(scope="session")
def device() -> Iterator[str]:
    """The device's type; the engine runs on it too."""
    if not (name := suite.device_type()):
        pytest.skip(suite.no_device())
    device_report.machine()
    before = os.environ.get("VLLM_TARGET_DEVICE")
    os.environ["VLLM_TARGET_DEVICE"] = name
    yield name
    del os.environ["VLLM_TARGET_DEVICE"]
    if before is not None:
        os.environ["VLLM_TARGET_DEVICE"] = before


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Memory that torch hands out is NaN; no compiler is needed for it, unlike for ``nan_poison``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operations that are not deterministic, which is not what this is for
        torch.set_deterministic_debug_mode("warn")
        yield
        torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def _a_test_that_hangs_is_told(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody could end a kernel or collective that never ends: the report is written, and the run is over."""
    if request.node.get_closest_marker("device") is None:
        yield
        return
    args = (request.node.nodeid, HANG_S, time.monotonic() - _began)
    timer = threading.Timer(HANG_S, device_report.hung, args)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


@pytest.fixture(autouse=True, scope="module")
def _memory_goes_back() -> Iterator[None]:
    """To the ranks of the next file, and to its engines."""
    yield
    if suite.device_type.cache_info().currsize and suite.device_type() not in ("", "cpu"):
        gc.collect()
        getattr(torch, suite.device_type()).empty_cache()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``implementation``: those of the table for the device, which is asked for only where its tests are to run."""
    if "implementation_of" in metafunc.fixturenames:
        asked = metafunc.config.option.markexpr == "device"
        pairs = [
            (name, implementation)
            for name, operator in metafunc.module.OPERATORS.items()
            for implementation in (suite.candidates(operator) if asked else ["reference"])
        ]
        metafunc.parametrize("implementation_of", pairs, ids=[f"{name}-{by}" for name, by in pairs])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "device" in report.keywords:
        device_report.note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and "tests/devices" in report.nodeid:
        device_report.note(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if device_report.OUTCOMES:
        text, files = device_report.write(time.monotonic() - _began)
        terminalreporter.write_line("")
        for line in text.splitlines():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"written: {', '.join(files)}")
