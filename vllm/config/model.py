# SPDX-License-Identifier: Apache-2.0
"""What the model is: its folder or file, its HF config, dtype and length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization import QuantizationConfig

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(frozen=True)
class ModelConfig:
    """One model, resolved.

    ``hf_config`` is the text model's ``PretrainedConfig`` (a multimodal checkpoint's ``text_config``);
    ``architecture`` is the registry name; ``max_model_len`` counts prompt and output tokens of one request; with
    ``fit_max_model_len`` the engine lowers it to what the KV cache holds; ``quant_config`` reads the weights where they
    are quantised, by ``quantization``.
    """

    model: str
    tokenizer: str
    hf_config: Any
    architecture: str
    dtype: torch.dtype
    max_model_len: int
    seed: int = 0
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    tokenizer_mode: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    load_format: str = "auto"
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    served_model_name: str | None = None
    fit_max_model_len: bool = False
    quantization: str | None = None
    quant_config: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode={self.logprobs_mode!r}: choose one of {', '.join(LOGPROBS_MODES)}")

    @property
    def hidden_size(self) -> int:
        return self.hf_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.hf_config.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        return self.hf_config.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        return getattr(self.hf_config, "num_key_value_heads", None) or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of a cached key's head."""
        if getattr(self.hf_config, "kv_lora_rank", None):  # latent attention
            return self.hf_config.kv_lora_rank + self.hf_config.qk_rope_head_dim
        return getattr(self.hf_config, "head_dim", None) or self.hidden_size // self.num_attention_heads

    @property
    def vocab_size(self) -> int:
        return self.hf_config.vocab_size

    @property
    def num_experts(self) -> int:
        """Routed experts of a MoE layer; 0 for a dense model."""
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            if getattr(self.hf_config, name, None):
                return getattr(self.hf_config, name)
        return 0

    @property
    def is_hybrid(self) -> bool:
        """Some layers keep a recurrent state, which cached attention blocks cannot bring back."""
        return "linear_attention" in (getattr(self.hf_config, "layer_types", None) or ())

    def get_vocab_size(self) -> int:
        return self.vocab_size
