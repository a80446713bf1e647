# SPDX-License-Identifier: Apache-2.0
"""How large activations are, which decides the grid that they are rounded to: real rows alone say it.

One row of padding that holds NaN, or is merely large, would otherwise set the scale of every token of the step.
Whatever quantises activations in torch asks here; kernels that do it themselves give each row a scale of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-12  # a row of zeros has a grid, too


def amax_of_real_rows(x_TK: Tensor, num_tokens_unpadded: int | Tensor | None = None, per_token: bool = False) -> Tensor:
    """The largest magnitude in float32: of all rows [], or of each [T, 1].

    Rows from ``num_tokens_unpadded`` on (None: there are none) count as 0, whatever they hold; a NaN in a real row is
    not hidden. The number may be a tensor of one element, for a captured step.
    """
    each = x_TK.abs().amax(-1, keepdim=True).float()
    if num_tokens_unpadded is not None:
        real = torch.arange(x_TK.shape[0], device=x_TK.device)[:, None] < num_tokens_unpadded
        each = torch.where(real, each, 0)
    if per_token:
        return each
    return each.amax() if len(each) else each.new_zeros(())


def activation_scale(
    x_TK: Tensor, largest: float, num_tokens_unpadded: int | Tensor | None = None, per_token: bool = True
) -> Tensor:
    """What ``x / scale`` is rounded with, where ``largest`` is the grid's last value: shapes as above, never 0."""
    return amax_of_real_rows(x_TK, num_tokens_unpadded, per_token).clamp(min=_TINY) / largest
