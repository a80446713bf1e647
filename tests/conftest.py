# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def nan_poison():
    """Every byte that ``torch.empty`` hands out is NaN, as on a device whose memory held something else."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the engine logs: its loggers do not pass records on to the root's."""
    logging.getLogger("vllm").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("vllm").removeHandler(caplog.handler)
