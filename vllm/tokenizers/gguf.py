# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file, built from its ``tokenizer.*`` metadata.

Read: the vocabulary with its types, scores and merges, the splitting rule (``pre``), ids of the special tokens,
``add_bos_token``, ``add_eos_token``, ``add_space_prefix``, every chat template, or a whole ``tokenizer.json``
(``tokenizer.huggingface.json``). Without effect on the vocabularies that decoders use: fill-in-the-middle ids (tokens
like others in a prompt), ``add_sep_token`` and ``token_type_count`` (BERT), ``remove_extra_whitespaces`` and
``precompiled_charsmap`` (T5). End tokens are the config's: see ``gguf_loader``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from vllm.logger import init_logger
from vllm.model_executor.model_loader.gguf_loader import read_gguf

logger = init_logger(__name__)

_REMEDY = "give the original model's folder as tokenizer=..., or token ids with skip_tokenizer_init=True"

# How the vocabularies' own tokenizer.json cut text into words.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SLASHED_TAIL = r"[^\r\n\p{L}\p{N}]?", _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED_TAIL}"
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED_TAIL}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_GPT2 = None  # what ByteLevel does by itself
_DIGITS_GPT2 = (r"\p{N}", _GPT2)

_SPLITS: dict[str, Any] = {
    name: split
    for names, split in (
        ("default gpt-2 gpt2 mpt olmo jais phi-2", _GPT2),
        ("smollm starcoder refact minerva-7b", _DIGITS_GPT2),
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe", _LLAMA3),
        ("qwen2 deepseek-r1-qwen stablelm2 megrez kormo", _QWEN2),
        ("gpt-4o llama4", _GPT4O),
        ("tekken", _TEKKEN),
        ("deepseek-coder", _DEEPSEEK_CODER),
    )
    for name in names.split()
}
# A word that is in the vocabulary is one token whether or not merges lead to it; BOS comes first by default.
_WHOLE_WORDS = {name for name, split in _SPLITS.items() if split in (_LLAMA3, _TEKKEN)} - {"smaug-bpe"}
_NFC = {"qwen2", "deepseek-r1-qwen"}
_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
    "cls_token": "cls",
}


def gguf_tokenizer(path: str | Path, **kwargs: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the GGUF file ``path``; ``kwargs`` go to transformers' class.

    Raises ValueError for a file without vocabulary and for a kind of vocabulary or a splitting rule that is unknown.
    """
    metadata = read_gguf(path).metadata
    keys = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    tokens: list[str] = keys.get("tokens", [])
    kind, pre = keys.get("model"), keys.get("pre")
    if kind == "gpt2" and not pre:
        pre = "qwen2" if str(metadata.get("general.architecture")).startswith("qwen") else "default"
    defaults = {"add_bos_token": kind == "llama" or pre in _WHOLE_WORDS, "add_eos_token": False}
    options: dict[str, Any] = {key: bool(keys.get(key, default)) for key, default in defaults.items()}
    for role, key in _ROLES.items():
        if (token_id := keys.get(f"{key}_token_id")) is not None and token_id < len(tokens):
            options[role] = tokens[token_id]
    if (template := _chat_template(metadata)) is not None:
        options["chat_template"] = template
    if "tokenizer.huggingface.json" in metadata:
        backend = Tokenizer.from_str(metadata["tokenizer.huggingface.json"])
        if backend.post_processor is not None:
            del options["add_bos_token"], options["add_eos_token"]
    elif kind not in ("llama", "gpt2") or not tokens:
        raise ValueError(
            f"{path} has a vocabulary of kind {kind!r} with {len(tokens)} tokens, not llama or gpt2; {_REMEDY}"
        )
    elif kind == "llama":
        backend = _sentencepiece(keys)
    else:
        backend = _byte_level(path, keys, pre)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in _of_type(keys, TokenType.CONTROL, TokenType.UNKNOWN)]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t in _of_type(keys, TokenType.USER_DEFINED)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, name_or_path=str(path), **{"clean_up_tokenization_spaces": False, **options, **kwargs}
    )


def _of_type(keys: Mapping[str, Any], *types: TokenType) -> list[str]:
    return [
        token for token, kind in zip(keys.get("tokens", ()), keys.get("token_type", ()), strict=False) if kind in types
    ]


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The one template, or all of them by name."""
    default, prefix = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _merges(keys: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    if (merges := keys.get("merges")) is None:
        return None
    # The first character may itself be a space in sentencepiece vocabularies of other converters.
    return [(merge[: (at := merge.index(" ", 1))], merge[at + 1 :]) for merge in merges]


def _sentencepiece(keys: Mapping[str, Any]) -> Tokenizer:
    """Pieces with ▁ for a space; bytes as <0xNN>; pieces of the best score are merged first."""
    tokens, types = keys["tokens"], keys.get("token_type") or [TokenType.NORMAL] * len(keys["tokens"])
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges(keys)
    if merges is None:
        scores = keys.get("scores") or [-float(index) for index in range(len(tokens))]
        normal = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == TokenType.NORMAL}
        merges = generate_merges(vocab, normal)
    unknown = next(iter(_of_type(keys, TokenType.UNKNOWN)), None)
    unk_id = keys.get("unknown_token_id")
    unknown = tokens[unk_id] if unk_id is not None and unk_id < len(tokens) else unknown
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space_first = bool(keys.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_first else spaces
    strip = [decoders.Strip(" ", 1, 0)] if space_first else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _byte_level(path: str | Path, keys: Mapping[str, Any], pre: str | None) -> Tokenizer:
    """GPT-2's alphabet of printable bytes; added tokens are spelt as they are."""
    if pre not in _SPLITS:
        raise ValueError(
            f"{path} splits text by tokenizer.ggml.pre={pre!r}; known: {', '.join(sorted(_SPLITS))}; {_REMEDY}"
        )
    if pre == "default":
        logger.warning("%s does not say how its vocabulary splits text (tokenizer.ggml.pre): taken as GPT-2's", path)
    tokens, merges = keys["tokens"], _merges(keys)
    if merges is None:
        raise ValueError(f"{path} has no tokenizer.ggml.merges; {_REMEDY}")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    split = _SPLITS[pre]
    parts = split if isinstance(split, tuple) else (split,)
    steps: list[Any] = [pre_tokenizers.Split(Regex(part), "isolated") for part in parts if part is not _GPT2]
    space_first = bool(keys.get("add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=space_first, use_regex=_GPT2 in parts))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
