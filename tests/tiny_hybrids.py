# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints of the hybrid models, and what transformers computes with them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import tiny_models as tiny
import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM
from transformers.utils import logging as transformers_logging

COMMON: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
HEADS_32 = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 1}
HEADS_64 = {"linear_key_head_dim": 64, "linear_value_head_dim": 32, "linear_num_value_heads": 6}
HEADS_128 = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 2, "head_dim": 64}

# name → (transformers' class, what differs from COMMON). Layer 3 is the first with full attention.
CHECKPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-next": (Qwen3NextForCausalLM, MOE),
    "qwen3-next-32": (Qwen3NextForCausalLM, {**MOE, **HEADS_32, "mlp_only_layers": [1], "attention_bias": True}),
    "qwen3-next-64": (Qwen3NextForCausalLM, {**MOE, **HEADS_64, "norm_topk_prob": False, "linear_conv_kernel_dim": 3}),
    "qwen3-next-128": (Qwen3NextForCausalLM, {**MOE, **HEADS_128, "tie_word_embeddings": True}),
    "qwen3.5": (Qwen3_5ForCausalLM, {}),
    "qwen3.5-64": (Qwen3_5ForCausalLM, {**HEADS_64, "tie_word_embeddings": True}),
    "qwen3.5-moe": (Qwen3_5MoeForCausalLM, MOE),
    "qwen3.5-moe-8-layers": (Qwen3_5MoeForCausalLM, {**MOE, "num_hidden_layers": 8}),
    "qwen3.5-moe-32": (Qwen3_5MoeForCausalLM, {**MOE, **HEADS_32}),
    "qwen3.5-moe-128": (Qwen3_5MoeForCausalLM, {**MOE, **HEADS_128}),
}
NAMES = tuple(CHECKPOINTS)  # without those that other files add

_folders = tempfile.TemporaryDirectory(prefix="vllm-hybrid-")


def folder(name: str) -> Path:
    return Path(_folders.name) / name


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights wide enough that near-ties are rare, and every small vector different from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.1 * noise if "conv1d" not in name else 0.4 * noise)
            elif "A_log" in name or "dt_bias" in name:
                parameter.copy_(noise)
            else:
                parameter.add_(0.2 * noise)


@functools.cache
def checkpoint(name: str, seed: int = 0) -> str:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    cls, changes = CHECKPOINTS[name]
    model = cls(cls.config_class(**{**COMMON, **changes}))
    randomise(model, seed)
    path = folder(f"{name}-{seed}")
    model.save_pretrained(path)
    return str(path)


@functools.cache
def reference_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(name, seed), dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def greedy(name: str, prompt_ids: tuple[int, ...], num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """transformers' greedy continuation in fp32."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = reference_model(name, seed).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    return tuple(out[0, len(prompt_ids) :].tolist())


def logprobs(name: str, token_ids: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' log-probabilities [len, vocab]: row i is the distribution of token i + 1."""
    with torch.inference_mode():
        logits = reference_model(name, seed, dtype)(torch.tensor([token_ids])).logits[0]
    return logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)


def make_llm(name: str, seed: int = 0, **kwargs: Any) -> Any:
    """Our engine on checkpoint ``name`` in fp32, small limits unless ``kwargs`` say otherwise."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 300,
    }
    return LLM(kwargs.pop("model", None) or checkpoint(name, seed), **{**settings, **kwargs})
