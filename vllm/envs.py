# SPDX-License-Identifier: Apache-2.0
"""The environment variables that the engine reads, each evaluated when it is used.

``vllm.envs.NAME`` reads the variable; an unparsable value raises ``ValueError`` naming it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from typing import Any


def _number(name: str, default: float, kind: Callable[[str], Any] = float) -> Callable[[], Any]:
    def read() -> Any:
        text = os.environ.get(name)
        if text is None or text == "":
            return default
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is not a number; unset it or give one such as {default}") from None

    return read


def _switch(name: str, default: bool | None) -> Callable[[], bool | None]:
    def read() -> bool | None:
        text = os.environ.get(name, "").strip().lower()
        if text == "":
            return default
        if text in ("1", "true", "on", "yes"):
            return True
        if text in ("0", "false", "off", "no"):
            return False
        raise ValueError(f"{name}={text!r} is not a switch; use 1 or 0")

    return read


def _text(name: str, default: str = "") -> Callable[[], str]:
    return lambda: os.environ.get(name, default)


VARIABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "VLLM_LOGGING_LEVEL": (_text("VLLM_LOGGING_LEVEL", "INFO"), "log level of the vllm loggers: a name or a number"),
    "VLLM_CONFIGURE_LOGGING": (_switch("VLLM_CONFIGURE_LOGGING", True), "0 leaves the vllm loggers to the caller"),
    "VLLM_CPU_KVCACHE_SPACE": (_number("VLLM_CPU_KVCACHE_SPACE", 0), "KV cache size on CPU in GiB; 0 = by free memory"),
    "VLLM_CPU_AMX": (_switch("VLLM_CPU_AMX", True), "0 keeps bfloat16 off the processor's matrix unit"),
    "VLLM_CPU_BF16_PAIRS": (
        _switch("VLLM_CPU_BF16_PAIRS", True),
        "0 widens bfloat16 where the processor would multiply pairs of it (AVX512_BF16)",
    ),
    "VLLM_COLLECTIVE_TIMEOUT_S": (
        _number("VLLM_COLLECTIVE_TIMEOUT_S", 7200.0),
        "seconds until the backend itself ends a wait",
    ),
    "VLLM_LOAD_TIMEOUT_S": (_number("VLLM_LOAD_TIMEOUT_S", 1800.0), "seconds that ranks wait for the slowest to load"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": (
        _switch("VLLM_ALLOW_LONG_MAX_MODEL_LEN", False),
        "1 allows a max_model_len beyond the model's positions",
    ),
    "VLLM_CACHE_ROOT": (
        lambda: (
            os.environ.get("VLLM_CACHE_ROOT")
            or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm-arc")
        ),
        "folder of built kernels and made checkpoints",
    ),
    "VLLM_TARGET_DEVICE": (_text("VLLM_TARGET_DEVICE", "auto"), "cpu, xpu, cuda, or auto: the first that has a device"),
    "VLLM_KERNELS": (_text("VLLM_KERNELS"), "implementations by name, for all operators or operator=name,…"),
    "VLLM_ATTENTION_BACKEND": (_text("VLLM_ATTENTION_BACKEND"), "attention backend by name; empty = the device's own"),
    "VLLM_POLICIES": (_text("VLLM_POLICIES"), "take the parallel policies of this platform (cpu, xpu, cuda)"),
    "VLLM_DIST_BACKEND": (
        _text("VLLM_DIST_BACKEND"),
        "torch.distributed's backend of the device groups; empty = the device's own, gloo lets ranks share a device",
    ),
    "VLLM_DP_PAD_TO_MAX": (_switch("VLLM_DP_PAD_TO_MAX", None), "pad every DP rank to the largest token count"),
    "VLLM_ORDERED_SUMS": (_switch("VLLM_ORDERED_SUMS", None), "sum over ranks in rank order"),
    "VLLM_DEBUG_NAN": (_text("VLLM_DEBUG_NAN"), "tell the first NaN and whose it is: 0, 1, raise or abort"),
    # Half an hour: a slow peer (its data, its compiler, a long step) takes minutes, and more costs idle machines.
    "VLLM_STALL_TIMEOUT_S": (_number("VLLM_STALL_TIMEOUT_S", 1800.0), "seconds without any progress that end a run"),
    "VLLM_SILENCE_TIMEOUT_S": (
        _number("VLLM_SILENCE_TIMEOUT_S", 8.0),
        "seconds after which a silent process of a served engine is taken for dead",
    ),
    "VLLM_PLACEMENT_TIMEOUT_S": (_number("VLLM_PLACEMENT_TIMEOUT_S", 60.0), "seconds that Ray gets to place the ranks"),
    "VLLM_API_KEY": (_text("VLLM_API_KEY"), "the key that a server asks for, and that its terminal clients give"),
    "VLLM_TRACE_COLLECTIVES": (_text("VLLM_TRACE_COLLECTIVES"), "1 prints each; a folder gets vllm doctor's ledgers"),
    "VLLM_CHECK_COLLECTIVES": (_switch("VLLM_CHECK_COLLECTIVES", False), "compare each between ranks before it runs"),
    "VLLM_HOST_IP": (_text("VLLM_HOST_IP"), "this machine's address as get_ip() gives it; empty = by its routes"),
    "VLLM_TORCH_PROFILER_DIR": (_text("VLLM_TORCH_PROFILER_DIR"), "folder of the traces of LLM.start_profile"),
    "VLLM_DP_RANK": (_number("VLLM_DP_RANK", 0, int), "this process's DP rank, where each is started by itself"),
    "VLLM_DP_RANK_LOCAL": (_number("VLLM_DP_RANK_LOCAL", 0, int), "its place among those of its host"),
    "VLLM_DP_SIZE": (_number("VLLM_DP_SIZE", 1, int), "how many such processes there are"),
    "VLLM_DP_MASTER_IP": (_text("VLLM_DP_MASTER_IP"), "host where they meet, that of DP rank 0"),
    "VLLM_DP_MASTER_PORT": (_number("VLLM_DP_MASTER_PORT", 0, int), "free port there"),
    "VLLM_MOE_BARRIER": (_switch("VLLM_MOE_BARRIER", None), "device barrier before each MoE collective"),
}

# Upstream's variables, and some that others set, that ask for nothing which is not so here: no statistics are sent,
# nothing is compiled or fetched, other devices are not this one.
_ASKS_FOR_NOTHING = re.compile(
    r"""VLLM_(
        NO_USAGE_STATS|DO_NOT_TRACK|USAGE_SOURCE|USAGE_STATS_SERVER|NO_DEPRECATION_WARNING|SERVER_DEV_MODE
        |ENABLE_V1_MULTIPROCESSING|WORKER_MULTIPROC_METHOD|RPC_TIMEOUT|RPC_BASE_PATH|MSGPACK_ZERO_COPY_THRESHOLD
        |RINGBUFFER_WARNING_INTERVAL|MQ_MAX_CHUNK_BYTES_MB|SLEEP_WHEN_IDLE|V1_OUTPUT_PROC_CHUNK_SIZE
        |HTTP_TIMEOUT_KEEP_ALIVE|KEEP_ALIVE_ON_ENGINE_DEATH|CONFIG_ROOT|ASSETS_CACHE|DISABLE_COMPILE_CACHE|FORCE_AOT_LOAD|COMPILE_CACHE_SAVE_FORMAT|SKIP_P2P_CHECK
        |MOE_SKIP_PADDING|(IMAGE|VIDEO|AUDIO)_FETCH_TIMEOUT|PATCHES_CACHE|UPSTREAM_ENV|VERSION_OVERRIDE
        |MAIN_CUDA_VERSION|PRECOMPILED_\w+|(ROCM|TPU|XLA|RAY|TEST)_\w+
        |PORT|(PORT|SERVICE)_\w+
    )""",
    re.VERBOSE,
)
_OFF = ("", "0", "false", "off", "no")


def unread() -> list[str]:
    """The ``VLLM_*`` variables of the environment that nothing reads, each with a known one that is like it."""
    names = []
    for name in sorted(os.environ):
        value = os.environ[name].strip().lower()
        switched_off = name.startswith("VLLM_USE_") and (value in _OFF or name == "VLLM_USE_V1")
        if not name.startswith("VLLM_") or name in VARIABLES or switched_off or _ASKS_FOR_NOTHING.fullmatch(name):
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
        names.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return names


# Upstream's that scripts read to learn how the engine works: what they say here, whatever the environment holds.
FIXED: dict[str, Any] = {
    "VLLM_USE_V1": True,
    "VLLM_ENABLE_V1_MULTIPROCESSING": False,
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_PLUGINS": None,
    "VLLM_USE_RAY_SPMD_WORKER": False,
    "VLLM_USE_RAY_COMPILED_DAG": False,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_ENABLE_MOE_DP_CHUNK": False,
    "VLLM_PORT": None,
}


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return VARIABLES[name][0]()
    if name in FIXED:
        return FIXED[name]
    if name == "environment_variables":
        return {variable: read for variable, (read, _) in VARIABLES.items()}
    raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(VARIABLES)
