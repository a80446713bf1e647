# SPDX-License-Identifier: Apache-2.0
"""Ends as a crashed engine does: a child still running, a file still in /dev/shm."""

from __future__ import annotations

import os
import time


def main() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    name = f"{os.getpid()}-cpushm"
    with open(f"/dev/shm/{name}", "w"):
        print(child, name, flush=True)
        time.sleep(3)
        os.abort()


if __name__ == "__main__":
    main()
