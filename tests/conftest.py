# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

_temporary = pytest.StashKey[tuple[str, subprocess.Popen[bytes]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels run on CPU tensors in its interpreter, and tiny models on one thread, for a second spins more
    than it computes; the device suite does neither, and tests of threads set their number. A drawn case may take as
    long as the machine makes it. What tests, and processes that they start and kill, make for a while lies in one
    folder, which goes with the run, however that ends."""
    with contextlib.suppress(ModuleNotFoundError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("any machine")
    if config.option.markexpr != "device":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="vllm-tests-")
        # Where this process is killed, its pipe is closed, and the folder goes all the same.
        command = ["sh", "-c", 'read -r _; rm -rf -- "$0"', folder]
        cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        config.stash[_temporary] = folder, cleaner
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        # torch makes it when it is first asked for: then it would look like something that an engine left
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.tempdir, "inductor"))
        os.chmod(tempfile.tempdir, 0o711)  # a test that gives up root's rights finds its own folder


def pytest_collection_finish() -> None:
    """An engine's captures collect garbage several times: among all that was imported too, it is most of a start."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _temporary in config.stash:
        folder, cleaner = config.stash[_temporary]
        shutil.rmtree(folder, ignore_errors=True)
        with cleaner:  # it would wait for whatever holds the pipe: a process that a test left, too
            cleaner.kill()


@pytest.fixture(autouse=True)
def _kernels_and_threads_are_chosen_anew() -> Iterator[None]:
    """A choice that a test or its environment made is not the next test's."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    yield
    if (table := sys.modules.get("vllm.kernels.table")) is not None:
        table.choose.cache_clear()
    if threads and (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _engines_end_with_their_module() -> Iterator[None]:
    """One that a test dropped, or that a fixture held, may wait for the collector; others ask what a process without an
    engine would hold, whatever came before them. Groups that a test made itself end here too."""
    yield
    if (groups := sys.modules.get("vllm.distributed.parallel_state")) is not None and groups._groups:
        gc.collect()
        groups.destroy_distributed_environment()


@pytest.fixture
def nan_poison(request):
    """Every byte of memory that torch hands out is NaN, as on a device whose memory held something else; the pattern
    is the test's own, see ``poison.py``."""
    from poison import poisoned

    with poisoned(request.node.nodeid):
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the engine logs: its loggers do not pass records on to the root's."""
    logging.getLogger("vllm").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("vllm").removeHandler(caplog.handler)
