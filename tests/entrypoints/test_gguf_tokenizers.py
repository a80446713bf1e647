# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GGUF files give the ids and texts of the tokenizer that was converted.

Reference: byte-level tokenizers trained here with the ``tokenizers`` package and written as llama.cpp's converter
writes them; transformers' table of splitting rules; sentencepiece vocabularies by hand.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from vllm.tokenizers import get_tokenizer
from vllm.tokenizers import gguf as gguf_tokenizers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. In 2023 there were 12345 dogs and 1000000 cats; it's 3.14!",
    "we're don't I'll they've HELLO World WorldWide camelCase snake_case 日本語 日本 naïve café Straße 🎉🎉",
    "def f(x):\n    return x + 1\n\n\n  y = [1, 2, 3]\t// a/b/c\r\n{'key': \"value\"}",
] * 4
TEXTS = [
    *CORPUS[:3],
    "",
    "  two  spaces   and   three ",
    "numbers 7 77 777 7777 ٣٤٥ ½",
    "don't DON'T we'Re \n\n\n\t\tx",
    unicodedata.normalize("NFD", "café naïve"),
    "<|start|>user\nhi<|end|>\n<think>no</think> <｜end▁of▁sentence｜>日本",
    "byte 🎈 outside",
]
SPECIAL, PLAIN = ["<|start|>", "<|end|>", "<｜end▁of▁sentence｜>"], ["<think>", "</think>"]
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def isolated(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


# pre → the steps of the pre-tokenizer, normalizer, ignore_merges, as published in tokenizer.json
KINDS: dict[str, tuple[list[Any], Any, bool]] = {
    "gpt-2": ([byte_level(True)], None, False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), byte_level(True)], None, False),
    "llama-bpe": (
        [
            isolated(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL),
            byte_level(False),
        ],
        None,
        True,
    ),
    "qwen2": (
        [isolated(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + TAIL), byte_level(False)],
        normalizers.NFC(),
        False,
    ),
    "tekken": ([isolated(GGUF_PRE_TOKENIZER_SPLITS["tekken"]), byte_level(False)], None, True),
    "deepseek-coder": (
        [
            isolated(r"[\r\n]"),
            isolated(r"\s?\p{L}+"),
            isolated(r"\s?\p{P}+"),
            isolated(r"[一-龥ࠀ-一가-퟿]+"),
            pre_tokenizers.Digits(individual_digits=True),
            byte_level(False),
        ],
        None,
        False,
    ),
}


def trained(pre: str) -> Tokenizer:
    steps, normalizer, ignore_merges = KINDS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
    return tokenizer


def write(path: Path, model: str | None, tokens: Sequence[str], types: Sequence[int], **keys: Any) -> Path:
    """``keys``: of ``tokenizer.ggml.``; those with a dot, spelt with two underscores, are whole."""
    writer = gguf.GGUFWriter(path, keys.pop("arch", "llama"))
    if model is not None:
        writer.add_tokenizer_model(model)
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types(types)
    for key, value in keys.items():
        name = key.replace("__", ".") if "__" in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def converted(path: Path, tokenizer: Tokenizer, pre: str | None, **keys: Any) -> Path:
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    kinds = {**dict.fromkeys(SPECIAL, TokenType.CONTROL), **dict.fromkeys(PLAIN, TokenType.USER_DEFINED)}
    merges = [" ".join(pair) for pair in gguf_merges(tokenizer)]
    keys = {"bos_token_id": tokens.index(SPECIAL[0]), "eos_token_id": tokens.index(SPECIAL[1]), **keys}
    if pre is not None:
        keys["pre"] = pre
    return write(path, "gpt2", tokens, [kinds.get(t, TokenType.NORMAL) for t in tokens], merges=merges, **keys)


def gguf_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level(tmp_path: Path, pre: str) -> None:
    reference = trained(pre)
    ours = get_tokenizer(converted(tmp_path / "m.gguf", reference, pre, add_bos_token=False))
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours(text).input_ids == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert len(ours) == reference.get_vocab_size()
    assert (ours.bos_token, ours.eos_token) == (SPECIAL[0], SPECIAL[1])


def test_rules_differ_where_they_should(tmp_path: Path) -> None:
    """Else the cases above could not tell a rule that is ignored."""
    reference = trained("llama-bpe")
    ids = {
        pre: tuple(tuple(get_tokenizer(converted(tmp_path / "m.gguf", reference, pre))(t).input_ids) for t in TEXTS)
        for pre in KINDS
    }
    assert len(set(ids.values())) == len(ids)


@pytest.mark.parametrize("pre", sorted(set(GGUF_PRE_TOKENIZER_SPLITS) & set(gguf_tokenizers._SPLITS)))
def test_splits_as_transformers(pre: str) -> None:
    ours, theirs = gguf_tokenizers._SPLITS[pre], GGUF_PRE_TOKENIZER_SPLITS[pre]
    for text in TEXTS:
        assert isolated(ours).pre_tokenize_str(text) == isolated(theirs).pre_tokenize_str(text)


def test_tokens_outside_the_byte_alphabet_keep_their_ids(tmp_path: Path) -> None:
    """As DeepSeek's: spelt with characters that are no bytes."""
    reference = trained("qwen2")
    name, token_id = SPECIAL[2], reference.token_to_id(SPECIAL[2])
    ours = get_tokenizer(converted(tmp_path / "m.gguf", reference, "deepseek-r1-qwen", eos_token_id=token_id))
    assert (ours.eos_token, ours.eos_token_id, ours(f"a{name}").input_ids[-1]) == (name, token_id, token_id)
    assert len(ours) == reference.get_vocab_size()


@pytest.mark.parametrize(
    ("pre", "flags", "first", "last"),
    [
        ("gpt-2", {}, False, False),
        ("qwen2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("tekken", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_begin_and_end_tokens(tmp_path: Path, pre: str, flags: dict[str, bool], first: bool, last: bool) -> None:
    reference = trained(pre)
    ours = get_tokenizer(converted(tmp_path / "m.gguf", reference, pre, **flags))
    bos, eos = (reference.token_to_id(t) for t in SPECIAL[:2])
    ids = reference.encode("The fox", add_special_tokens=False).ids
    assert ours("The fox").input_ids == [bos] * first + ids + [eos] * last
    assert ours("The fox", add_special_tokens=False).input_ids == ids


def test_roles_of_tokens(tmp_path: Path) -> None:
    reference = trained("gpt-2")
    roles = {"unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask", "cls": "cls"}
    ids = {f"{key}_token_id": 10 + i for i, key in enumerate(roles)}
    ours = get_tokenizer(converted(tmp_path / "m.gguf", reference, "gpt-2", fim_pre_token_id=7, **ids))
    for i, role in enumerate(roles.values()):
        assert getattr(ours, f"{role}_token_id") == 10 + i
    assert len(ours) == reference.get_vocab_size()


def test_chat_templates(tmp_path: Path) -> None:
    reference, path = trained("gpt-2"), tmp_path / "m.gguf"
    messages = [{"role": "user", "content": "hi"}]
    one = {"tokenizer__chat_template": "one {{ messages[0].content }}"}
    more = {"tokenizer__chat_templates": ["tool_use"], "tokenizer__chat_template__tool_use": "tools {{ bos_token }}"}
    ours = get_tokenizer(converted(path, reference, "gpt-2", **one))
    assert ours.apply_chat_template(messages, tokenize=False) == "one hi"
    ours = get_tokenizer(converted(path, reference, "gpt-2", **one, **more))
    assert ours.apply_chat_template(messages, tokenize=False) == "one hi"
    assert ours.apply_chat_template(messages, chat_template="tool_use", tokenize=False) == f"tools {SPECIAL[0]}"
    assert get_tokenizer(converted(path, reference, "gpt-2")).chat_template is None


def test_a_whole_tokenizer_json_is_taken(tmp_path: Path) -> None:
    reference = trained("smollm")
    ours = get_tokenizer(
        converted(tmp_path / "m.gguf", reference, "gpt-2", tokenizer__huggingface__json=reference.to_str())
    )
    for text in TEXTS:
        assert ours(text).input_ids == reference.encode(text).ids


def test_a_missing_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpt2, qwen2 = trained("gpt-2"), trained("qwen2")
    for pre, arch, reference in ((None, "llama", gpt2), ("default", "llama", gpt2), (None, "qwen3", qwen2)):
        caplog.clear()
        ours = get_tokenizer(converted(tmp_path / "m.gguf", reference, pre, arch=arch))
        assert ("taken as GPT-2's" in caplog.text) == (arch == "llama")
        assert [ours(t).input_ids for t in TEXTS] == [reference.encode(t).ids for t in TEXTS]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    remedy = r"(?s)tokenizer=.*skip_tokenizer_init=True"
    for make, message in (
        (lambda: converted(path, trained("gpt-2"), "brand-new"), "pre='brand-new'; known: .*qwen2"),
        (lambda: write(path, "t5", ["a"], [1]), "kind 't5' with 1 tokens"),
        (lambda: write(path, None, [], []), "kind None with 0 tokens"),
        (lambda: write(path, "gpt2", ["a"], [1], pre="qwen2"), r"no tokenizer\.ggml\.merges"),
    ):
        make()
        with pytest.raises(ValueError, match=remedy) as caught:
            get_tokenizer(path)
        caught.match(message)


# --- sentencepiece: <unk> <s> </s>, the bytes, then pieces with scores; better scores merge first

PIECES = ["▁", "h", "e", "l", "o", "i", "b", "▁h", "ll", "el", "ello", "▁hi", "hi", "▁▁", "▁hello", "hello"]
SCORES = [-20.0, -21.0, -22.0, -23.0, -24.0, -25.0, -26.0, -3.0, -1.0, -2.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0]
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "<tool> x"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]


def sentencepiece(path: Path, **keys: Any) -> Any:
    roles = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    scores = [0.0] * 259 + SCORES + [0.0]
    return get_tokenizer(write(path, "llama", VOCABULARY, TYPES, scores=scores, **roles, **keys))


def ids_of(*pieces: str) -> list[int]:
    return [VOCABULARY.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # el (-2) goes after ll (-1): h e ll o; then ▁h (-3); no piece joins ▁h e, e ll or ll o
        ("hello", ["▁h", "e", "ll", "o"]),
        ("hi", ["▁hi"]),
        ("hi hi", ["▁hi", "▁hi"]),
        # a space more before the one that every text gets: ▁▁ is worse than ▁h
        (" hi", ["▁", "▁hi"]),
        ("elo", ["▁", "el", "o"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("\n", ["▁", "<0x0A>"]),
        # every stretch of text after a special token begins with a space
        ("<s>hi</s>hi", ["<s>", "▁hi", "</s>", "▁hi"]),
        ("hi<tool> xhi", ["▁hi", "<tool> x", "▁hi"]),
    ],
)
def test_sentencepiece(tmp_path: Path, text: str, pieces: list[str]) -> None:
    ours = sentencepiece(tmp_path / "m.gguf")
    assert ours(text, add_special_tokens=False).input_ids == ids_of(*pieces)
    assert ours(text).input_ids == ids_of("<s>", *pieces)
    if "<" not in text:
        assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text


def test_sentencepiece_without_a_space_first(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert ours("hi hi").input_ids == ids_of("hi", "▁hi", "</s>")
    assert ours.decode(ids_of("▁hi", "hi"), skip_special_tokens=True) == " hihi"
    assert ours.unk_token_id == 0


def test_sentencepiece_with_merges_of_its_own(tmp_path: Path) -> None:
    """Files converted from a tokenizer.json have merges and no scores that mean anything."""
    ours = sentencepiece(tmp_path / "m.gguf", merges=["e l", "▁ h", "h i"])
    assert ours("hello", add_special_tokens=False).input_ids == ids_of("▁h", "el", "l", "o")
