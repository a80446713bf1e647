# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, loaded through transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub id or a GGUF file.

    ``tokenizer_mode``: ``auto`` and ``hf`` take the fast tokenizer where there is one, ``slow`` the Python one. The
    rest goes to transformers' ``from_pretrained``. Raises ``ValueError``, with the path and the cause, for a tokenizer
    that cannot be read.
    """
    from transformers import AutoTokenizer

    if tokenizer_mode not in ("auto", "hf", "slow"):
        raise NotImplementedError(f"tokenizer_mode={tokenizer_mode!r} is not supported; use 'auto', 'hf' or 'slow'")
    name = os.path.expanduser(os.fspath(tokenizer_name))
    try:
        if os.path.isfile(name):
            from vllm.tokenizers.gguf import gguf_tokenizer

            return gguf_tokenizer(name, **kwargs)
        if tokenizer_mode == "slow":
            kwargs["use_fast"] = False
        return AutoTokenizer.from_pretrained(
            name, *args, trust_remote_code=trust_remote_code, revision=revision, cache_dir=download_dir, **kwargs
        )
    except Exception as error:  # each tokenizer format has its own way to fail
        raise ValueError(
            f"the tokenizer of {name!r} cannot be loaded: {type(error).__name__}: {error}\n"
            "Give a folder with tokenizer files, or a .gguf file, as tokenizer=..., or pass token ids with "
            "skip_tokenizer_init=True"
        ) from error


__all__ = ["get_tokenizer"]


def tokenizer_of(config: Any) -> Any:
    """That of a ``ModelConfig``; None with ``skip_tokenizer_init``."""
    if config.skip_tokenizer_init:
        return None
    return get_tokenizer(
        config.tokenizer,
        tokenizer_mode=config.tokenizer_mode,
        trust_remote_code=config.trust_remote_code,
        revision=config.tokenizer_revision,
    )
