# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels ahead of their first use and prints the library's path."""

from vllm.kernels.cpu.build import build

print(build())
