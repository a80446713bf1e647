# SPDX-License-Identifier: Apache-2.0
"""Which attention backend serves which device; ``VLLM_ATTENTION_BACKEND`` overrides the choice."""

from __future__ import annotations

import importlib

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend

_BACKENDS = {
    "CPU_ATTN": "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
    "TORCH_PAGED": "vllm.v1.attention.backends.torch_paged:TorchPagedBackend",
}
_DEFAULT = {"cpu": "CPU_ATTN", "xpu": "TORCH_PAGED", "cuda": "TORCH_PAGED"}


def get_attn_backend() -> type[AttentionBackend]:
    """The backend class for the current platform."""
    name = envs.VLLM_ATTENTION_BACKEND or _DEFAULT[current_platform.device_type]
    if name not in _BACKENDS:
        raise ValueError(f"VLLM_ATTENTION_BACKEND={name!r} is unknown; known: {', '.join(sorted(_BACKENDS))}")
    module, _, attribute = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
