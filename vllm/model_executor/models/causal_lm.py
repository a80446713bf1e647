# SPDX-License-Identifier: Apache-2.0
"""A decoder with its output head, and how checkpoints name and hold its weights."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import cached_in_fp8
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_update import HeldForms, drop_weights, move_weights, update_weights
from vllm.model_executor.models.decoder import DecoderModel
from vllm.model_executor.parameter import WeightSpec, collect_weight_specs

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.weight_utils import StoredTensor


logger = init_logger(__name__)

VISION_WEIGHTS = r"^(model\.)?(vision_tower|multi_modal_projector)\."


class CausalLM(nn.Module):
    """A decoder and its output head; ``prefix`` is put before every checkpoint name, ``model_prefix`` before those of
    the decoder.

    ``transposed_experts``: how checkpoints stack experts, see ``weight_utils.read_safetensors``.
    ``ignored_weights``: rotary tables, which are computed; scales of a quantised KV cache, which ``load_cache_scales``
    reads where it is one, or of activations, which are in the model's dtype here; the value head of a reinforcement
    learner. So are the ``num_nextn_predict_layers`` past the last layer, which predict several tokens at once.
    """

    model_cls: ClassVar[type[DecoderModel]]
    model_prefix: ClassVar[str] = "model"
    transposed_experts: ClassVar[bool] = False
    ignored_weights: tuple[str, ...] = (
        r"rotary_emb\.(original_)?inv_freq$|rotary_emb\.(cos|sin)_cached$|(^|\.)position_ids$",
        r"self_attn\.(\w+\.)?(q|k|v|kv|prob)(_cache)?_(scale|zero_point)$|self_attn\.\w_proj\.output_scale$",
        r"\.input_scale$|^v_head\.",
    )

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        root = f"{prefix}." if prefix else ""
        first, extra = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0) or 0
        if extra:
            numbers = "|".join(map(str, range(first, first + extra)))
            self.ignored_weights = (*self.ignored_weights, rf"^(\w+\.)*layers\.({numbers})\.")
        self.model = self.model_cls(vllm_config, f"{root}{self.model_prefix}")
        if vllm_config.cache_config.is_fp8:
            for layer in cached_in_fp8(self):
                layer.cache_dtype = torch.float8_e4m3fn
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            dtype,
            f"{root}lm_head",
            tie_to=self.model.embed_tokens if self.tied else None,
        )
        self.device, self.dtype = torch.get_default_device(), dtype
        self.missing_weights: set[str] = set()
        self.held_forms = HeldForms()
        self.has_new_weights = False
        self.wait_for_steps: Callable[[], None] = lambda: None  # before weights change that a step in flight reads

    @classmethod
    def checkpoint_name(cls, stored: str) -> str:
        """The name in ``weight_specs`` of the tensor that a checkpoint calls ``stored``.

        The decoder alone is saved without a prefix, and one taken from a multimodal model, or put into it, has another.
        """
        name = re.sub(r"^((model|language_model)\.)*(?=(layers|embed_tokens|norm)\.)", f"{cls.model_prefix}.", stored)
        return re.sub(r"^((model|language_model)\.)+(?=lm_head\.)", "", name)

    @functools.cached_property
    def _spec_of(self) -> dict[str, WeightSpec]:
        return {spec.name: spec for spec in self.weight_specs()}

    @functools.cached_property
    def _of_module(self) -> dict[int, set[str]]:
        of: dict[int, set[str]] = {}
        for name, spec in self._spec_of.items():
            if spec.needed and not spec.optional:
                of.setdefault(id(spec.owner), set()).add(name)
        return of

    def weights_of(self, module: nn.Module | None) -> set[str]:
        """The names of the weights that ``module`` cannot do without."""
        return self._of_module.get(id(module), set())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Replace weights in place, in the middle of an engine's life too; see ``weight_update.update_weights``.

        The engine forgets its cached prefixes before the next step; running requests go on with what they have cached.
        """
        self.wait_for_steps()
        self.has_new_weights = True
        with torch.no_grad(), torch.device(self.device):
            taken = update_weights(self, self._spec_of, weights, self.dtype)
        return taken

    def forget_weight_specs(self) -> None:
        """Experts have moved: others of them are this rank's to load."""
        vars(self).pop("_spec_of", None)
        vars(self).pop("_of_module", None)

    def drop_weights(self) -> None:
        """Free all weights; each is in ``missing_weights`` until ``load_weights`` brings it."""
        self.wait_for_steps()
        drop_weights(self)
        self.missing_weights = {name for name, spec in self._spec_of.items() if spec.needed and not spec.optional}

    def move_weights(self, device: torch.device) -> None:
        self.wait_for_steps()
        move_weights(self, device)

    def weight_specs(self) -> list[WeightSpec]:
        return collect_weight_specs(self)

    def stand_in(self, stored: list[StoredTensor]) -> list[StoredTensor]:
        """``stored``, where a file that keeps shared tensors once has the tied weight under the head's name alone."""
        names = {tensor.name for tensor in stored}
        embedding, head = self.model.embed_tokens.prefix + ".weight", self.lm_head.prefix + ".weight"
        if not self.tied or embedding in names:
            return stored
        return [dataclasses.replace(t, name=embedding) if t.name == head else t for t in stored]

    def process_weights_after_loading(self) -> None:
        self.lm_head.settle_tie()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids and positions [T] int64 → hidden states [T, hidden]."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden states [R, hidden] → logits [R, vocab], the same on every TP rank."""
        return self.lm_head(hidden_states)


class TextPart(CausalLM):
    """The text model where it sits inside a multimodal checkpoint; put before the model's own class."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix)
        logger.info("%s: only the text model is loaded; images and videos cannot be given", type(self).__name__)
