# SPDX-License-Identifier: Apache-2.0
"""AutoRound checkpoints (Cheng et al. 2023, arXiv:2309.05516): packed as GPTQ's (the first version) or as AWQ's.

Which of the two, and the bits, each matrix shows; ``extra_config``, which lists exceptions, is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization.gptq import GPTQConfig

_PACKINGS = ("auto_gptq", "auto_awq", "gptq", "awq")


class AutoRoundConfig(GPTQConfig):
    method = "auto-round"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({**config, "checkpoint_format": None})
        packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq").lower()
        kind = str(config.get("data_type") or "int")
        if packing.rpartition(":")[2] not in _PACKINGS or kind != "int":
            raise ValueError(
                f"auto-round with packing_format={packing!r} and data_type={kind!r} is not supported; integers packed "
                f"as auto_round:auto_gptq or auto_round:auto_awq are"
            )
