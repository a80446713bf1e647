# SPDX-License-Identifier: Apache-2.0
"""Where older clients look for the tokenizer."""

from vllm.tokenizers import get_tokenizer

__all__ = ["get_tokenizer"]
