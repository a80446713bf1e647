# SPDX-License-Identifier: Apache-2.0
"""The environment variables that the engine reads, each evaluated when it is used.

``vllm.envs.NAME`` reads the variable; an unparsable value raises ``ValueError`` naming it.
"""

from __future__ import annotations

import os
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
    "VLLM_LOGGING_LEVEL": (_text("VLLM_LOGGING_LEVEL", "INFO"), "log level of the vllm loggers"),
    "VLLM_CPU_KVCACHE_SPACE": (_number("VLLM_CPU_KVCACHE_SPACE", 0), "KV cache size on CPU in GiB; 0 = by free memory"),
    "VLLM_CPU_KERNELS": (_switch("VLLM_CPU_KERNELS", True), "0 runs the plain torch twins of the C++ CPU kernels"),
    "VLLM_COLLECTIVE_TIMEOUT_S": (
        _number("VLLM_COLLECTIVE_TIMEOUT_S", 7200.0),
        "seconds until the backend itself ends a wait",
    ),
    "VLLM_LOAD_TIMEOUT_S": (_number("VLLM_LOAD_TIMEOUT_S", 1800.0), "seconds that ranks wait for the slowest to load"),
    "VLLM_CACHE_ROOT": (
        lambda: (
            os.environ.get("VLLM_CACHE_ROOT")
            or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm-arc")
        ),
        "folder of built kernels and made checkpoints",
    ),
    "VLLM_TARGET_DEVICE": (_text("VLLM_TARGET_DEVICE", "auto"), "cpu, xpu, cuda, or auto: the first that has a device"),
    "VLLM_ATTENTION_BACKEND": (_text("VLLM_ATTENTION_BACKEND"), "attention backend by name; empty = the device's own"),
    "VLLM_POLICIES": (_text("VLLM_POLICIES"), "take the parallel policies of this platform (cpu, xpu, cuda)"),
    "VLLM_DP_PAD_TO_MAX": (_switch("VLLM_DP_PAD_TO_MAX", None), "pad every DP rank to the largest token count"),
    "VLLM_ORDERED_SUMS": (_switch("VLLM_ORDERED_SUMS", None), "sum over ranks in rank order"),
    "VLLM_DEBUG_NAN": (_text("VLLM_DEBUG_NAN"), "tell the first NaN and whose it is: 0, 1, raise or abort"),
    # Half an hour: a slow peer (its data, its compiler, a long step) takes minutes, and more costs idle machines.
    "VLLM_STALL_TIMEOUT_S": (_number("VLLM_STALL_TIMEOUT_S", 1800.0), "seconds without any progress that end a run"),
    "VLLM_TRACE_COLLECTIVES": (_text("VLLM_TRACE_COLLECTIVES"), "1 prints each; a folder gets vllm doctor's ledgers"),
    "VLLM_CHECK_COLLECTIVES": (_switch("VLLM_CHECK_COLLECTIVES", False), "compare each between ranks before it runs"),
    "VLLM_MOE_BARRIER": (_switch("VLLM_MOE_BARRIER", None), "device barrier before each MoE collective"),
}


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return VARIABLES[name][0]()
    raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(VARIABLES)
