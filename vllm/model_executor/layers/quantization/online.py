# SPDX-License-Identifier: Apache-2.0
"""Float checkpoints quantised while they are loaded: ``quantization="fp8"`` and ``"int8"``.

One scale a row, so that every parallel layout has the same weights; inputs stay as they are. ``base.KEPT`` keep their
precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.layers.quantization.base import KEPT, QuantizationConfig, quantised_while_read
from vllm.model_executor.model_loader.weight_utils import StoredTensor
from vllm.model_executor.parameter import WeightSpec


class OnlineConfig(QuantizationConfig):
    online = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.method = str(config["quant_method"])
        self.form = (self.method, 1 << 62)

    def matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        raise NotImplementedError("nothing is stored quantised")

    def adapt(self, stored: Sequence[StoredTensor], specs: Sequence[WeightSpec]) -> list[StoredTensor]:
        return quantised_while_read(stored, specs, *self.form, KEPT.search)

    quantised_in_place = adapt
