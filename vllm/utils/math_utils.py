# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def round_up(x: int, y: int) -> int:
    """The smallest multiple of y that is at least x."""
    return cdiv(x, y) * y


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()
