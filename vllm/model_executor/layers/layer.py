# SPDX-License-Identifier: Apache-2.0
"""The base of the layers that hold tensors."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module that says when one of its attributes is another. Captured steps read the tensors that were there when
    they were captured; to look at all of them before each step takes longer than all else that is asked then.

    ``num_changes``: how often an attribute of any layer was set or deleted.
    """

    num_changes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        Layer.num_changes += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        Layer.num_changes += 1
        super().__delattr__(name)
