# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints whose heads and experts are as large as devices' kernels want them (heads of 16 would run in plain
torch), and how far an engine's tokens are from transformers'."""

from __future__ import annotations

from typing import Any

import tiny_deepseeks  # noqa: F401
import tiny_hybrids as hybrids
import tiny_models as tiny

_WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 64}
_WIDE_MOE: dict[str, Any] = {**_WIDE, "moe_intermediate_size": 64}
_WIDE_HYBRID: dict[str, Any] = {**_WIDE, **hybrids.HEADS_128, "linear_num_value_heads": 4, "linear_num_key_heads": 2}

# What differs from the tiny checkpoint of the same name without "-wide".
PLAIN: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "llama-rope": _WIDE,
    "qwen3": _WIDE | {"head_dim": 128},
    "qwen3-window": _WIDE,
    "mixtral": _WIDE | {"intermediate_size": 128},
    "qwen3-moe": _WIDE_MOE,
    "qwen3-moe-mixed": _WIDE_MOE,
    # A head and a latent as DeepSeek publishes them; and smaller ones, whose prompts are expanded.
    "v3": _WIDE_MOE | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "v2-lite": _WIDE_MOE | {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3-next": _WIDE_HYBRID | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3.5": _WIDE_HYBRID,
    "qwen3.5-moe": _WIDE_HYBRID | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
for _models, _changes in ((tiny, PLAIN), (hybrids, HYBRID)):
    for _name, _of in _changes.items():
        _stem, _fields = _models.CHECKPOINTS[_name]
        _models.CHECKPOINTS[f"{_name}-wide"] = (_stem, {**_fields, **_of})

NAMES = [f"{name}-wide" for name in (*PLAIN, *HYBRID)]
NEAR = 2e-3  # log-probabilities nearer than this may change places by the device's rounding


def module_of(name: str) -> Any:
    return hybrids if name in hybrids.CHECKPOINTS else tiny


def assert_transformers_tokens(name: str, prompt: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Each token is the one that transformers finds likeliest after the prompt and the tokens before it."""
    scores = module_of(name).logprobs(name, prompt + got)
    for i, token in enumerate(got):
        at = scores[len(prompt) + i - 1]
        best = int(at.argmax())
        assert at[best] - at[token] < NEAR, (
            f"{name}, prompt of {len(prompt)}: token {i} of {got} is {token} ({float(at[token]):.4f}), transformers' "
            f"is {best} ({float(at[best]):.4f})"
        )
