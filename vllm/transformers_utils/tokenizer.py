# SPDX-License-Identifier: Apache-2.0
"""Where older clients look for the tokenizer."""

from typing import Any, TypeAlias

from vllm.tokenizers import get_tokenizer

AnyTokenizer: TypeAlias = Any

__all__ = ["AnyTokenizer", "get_tokenizer"]
