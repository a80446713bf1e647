# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations


class Counter:
    """``next(counter)`` counts up from ``start``; ``counter`` attribute: the number that comes next."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        self.counter = 0
