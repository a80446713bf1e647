# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import numpy as np
import torch

STR_DTYPE_TO_TORCH_DTYPE: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def set_random_seed(seed: int | None) -> None:
    """Seed Python's, numpy's and torch's generators; the engine itself draws from none of them. None: leave them."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
