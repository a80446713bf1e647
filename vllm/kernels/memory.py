# SPDX-License-Identifier: Apache-2.0
"""Host memory for what is read as a whole in every step, and zeroed caches."""

from __future__ import annotations

import ctypes
import math
import mmap

import numpy as np
import torch
from torch import Tensor


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back ``tensor``'s memory with huge pages; returns it.

    For what is read as a whole in every step (weights, the KV cache): saves a good part of the address look-ups.
    """
    page = 2 << 20
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > begin and hasattr(mmap, "MADV_HUGEPAGE"):
        # advice only: where the system has no huge pages the call fails and small ones serve
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
    return tensor


def huge_page_empty(size: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of ``size`` elements on huge pages where there are any, contents undefined."""
    return advise_huge_pages(torch.empty(size, dtype=dtype, device="cpu"))


def zeroed_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor on the default device. On CPU its pages take memory when they are first written, not before."""
    if torch.get_default_device().type != "cpu":
        return torch.zeros(shape, dtype=dtype)
    memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return advise_huge_pages(memory).view(dtype).view(shape)


def zeroed_state(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
