# SPDX-License-Identifier: Apache-2.0
"""``vllm collect-env``: the software, the machine and the variables that decide how the engine runs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm import __version__, envs
from vllm.kernels.table import choose
from vllm.platforms import PLATFORMS, current_platform, get_platform, host_limits
from vllm.utils.argparse_utils import Parser

_PACKAGES = (
    "torch transformers tokenizers safetensors gguf numpy jinja2 triton lm-eval intel-extension-for-pytorch "
    "oneccl-bind-pt vllm-xpu-kernels fla-core"
)
_CPU_FLAGS = "avx2 f16c fma avx512f avx512_bf16 avx512_fp16 avx512_vnni amx_tile amx_bf16 asimd bf16"
_PREFIXES = (
    "CCL_ FI_ I_MPI_ VLLM_ SYCL_ UR_ ZE_ ZES_ ONEAPI_ NCCL_ CUDA_ GLOO_ OMP_ GOMP_ KMP_ MKL_ TORCH_ PYTORCH_ MASTER_"
)
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LD_PRELOAD")


def collect() -> dict[str, dict[str, Any]]:
    """Section → name → value, all of it JSON."""
    return {
        "software": {
            "vllm": __version__,
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
            "torch threads": torch.get_num_threads(),
            **{name: _version(name) for name in _PACKAGES.split()},
        },
        "processor": _processor(),
        "devices": _devices(),
        "communication": _communication(),
        "kernels": _kernels(),
        "variables": _variables(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    found = set(flags.group(1).split()) if flags else set()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "name": model.group(1) if model else platform.processor() or platform.machine(),
        "cores usable": min(limit.free for limit in host_limits.processor_limits()),
        "cores": os.cpu_count(),
        "features": [flag for flag in _CPU_FLAGS.split() if flag in found],
        "torch capability": torch.backends.cpu.get_cpu_capability(),
        "memory GiB": round(pages / 2**30, 1),
        "memory free": [f"{limit.free / 2**30:.1f} GiB under {limit.label}" for limit in host_limits.memory_limits()],
    }


def _devices() -> dict[str, Any]:
    found: dict[str, Any] = {"used": current_platform.device_type}
    for name in PLATFORMS:
        one = get_platform(name)
        if name != "cpu" and one.is_available():
            for index in range(one.device_count() or 0):
                free, total = one.memory_info(torch.device(name, index))
                gib = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
                found[f"{name}:{index}"] = f"{one.device_name(torch.device(name, index))}, {gib}"
    return found


def _communication() -> dict[str, Any]:
    dist = torch.distributed
    backends = [
        name
        for name in ("gloo", "nccl", "xccl", "mpi")
        if dist.is_available() and getattr(dist, f"is_{name}_available", lambda: False)()
    ]
    try:
        used = current_platform.group_backend
    except ValueError as error:
        used = f"none: {error}"
    return {
        "torch backends": backends,
        "used": used,
        "policies": repr(current_platform.policies),
        "warnings": current_platform.warnings(),
    }


def _kernels() -> dict[str, Any]:
    folder = Path(envs.VLLM_CACHE_ROOT) / "kernels"
    found: dict[str, Any] = {"folder": str(folder), "built": sorted(path.name for path in folder.glob("*.so"))}
    try:
        choices = choose(current_platform.device_type).values()
        found |= {choice.operator: f"{choice.implementation} ({choice.reason})" for choice in choices}
    except ValueError as error:
        found["error"] = str(error)
    return found


def _variables() -> dict[str, str]:
    prefixes = (*_PREFIXES.split(), "SLURM_", "OMPI_COMM_", "PMI_", "MPI_")
    chosen = {name: value for name, value in os.environ.items() if name.startswith(prefixes) or name in _RANK}
    secret = re.compile("TOKEN|KEY|SECRET|PASSWORD")
    return {name: "(hidden)" if secret.search(name) else chosen[name] for name in sorted(chosen)}


def _table(collected: dict[str, dict[str, Any]]) -> str:
    lines: list[str] = []
    for section, values in collected.items():
        lines += ["", section] if lines else [section]
        for name, value in values.items():
            if isinstance(value, list):
                value = ", ".join(map(str, value)) or "none"
            lines.append(f"  {name:30} {'not installed' if value is None else value}")
        if not values:
            lines.append("  none set")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("vllm collect-env", "Print what a bug report needs to know of this machine.")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    args = parser.parse_args(argv)
    collected = collect()
    print(json.dumps(collected, indent=2) if args.json else _table(collected))
    return 0
