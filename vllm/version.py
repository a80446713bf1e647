# SPDX-License-Identifier: Apache-2.0
"""The version, where scripts look for it."""

from vllm import __version__, __version_tuple__

__all__ = ["__version__", "__version_tuple__"]
