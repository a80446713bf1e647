# SPDX-License-Identifier: Apache-2.0
"""Text piece by piece against the text of all tokens at once."""

from __future__ import annotations

import codecs
import functools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import Detokenizer, IncrementalDecoder, continuation_ids
from vllm.v1.engine.logprobs import TokenText

TEXT = "Hello, world! 🎉👩‍💻 漢字かな Zürich — the end. \N{REPLACEMENT CHARACTER}?"


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen, whose merges cut characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["hello world the end 漢字 漢語 ", "🎉🎈"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Words that begin with a space, and bytes for the rest, as of Llama 2."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁the", "▁end", "the", "▁", "a", "▁hello", "!"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def slow() -> ByT5Tokenizer:
    """A tokenizer in Python, a token for each byte."""
    return ByT5Tokenizer()


def decoder_of(tokenizer, prompt=(), skip=True):
    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=skip)

    return IncrementalDecoder(decode, list(prompt), lambda: continuation_ids(tokenizer)), decode


@functools.cache
def token_bytes(tokenizer, token_id: int) -> bytes:
    """By the alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token_id in tokenizer.all_special_ids:
        return token.encode()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return bytes(moved[ord(char) - 0x100] if ord(char) >= 0x100 else ord(char) for char in token)


def pieces(tokenizer, prompt, output, skip=True) -> list[str]:
    decoder, _ = decoder_of(tokenizer, prompt, skip)
    return [decoder.add([token], finished=i == len(output) - 1) for i, token in enumerate(output)]


def at_once(tokenizer, prompt, output, skip=True) -> str:
    _, decode = decoder_of(tokenizer, skip=skip)
    text = decode([*prompt, *output])
    before = decode(list(prompt))
    while not text.startswith(before):
        before = before[:-1]
    special = set(tokenizer.all_special_ids) if skip else set()
    data = b"".join(token_bytes(tokenizer, i) for i in (*prompt, *output) if i not in special)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(data)
    if utf8.getstate()[0]:
        text = text[:-1]
    return text[len(before) :]


@pytest.mark.parametrize("make", [byte_level, slow])
@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_no_half_characters(make, cut):
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    made = pieces(tokenizer, ids[:cut], ids[cut:])
    assert sum("\ufffd" in piece for piece in made) == 1, "the one that is in the text"
    assert TEXT.endswith("".join(made))
    assert made.count("") >= 2, "characters were cut, or this shows nothing"


def test_byte_fallback_characters_and_spaces():
    tokenizer = byte_fallback()
    word = tokenizer.convert_tokens_to_ids
    output = [word("▁hello"), *(word(f"<0x{byte:02X}>") for byte in "漢🎉é".encode()), word("▁the"), word("▁end")]
    made = pieces(tokenizer, [1], output)
    assert made == ["hello", "", "", "漢", "", "", "", "🎉", "", "é", " the", " end"]
    assert pieces(tokenizer, [1, word("▁the")], [word("▁end"), 2, word("▁the")]) == [" end", "", " the"]


def test_naive_pieces_would_be_wrong():
    """The fault itself: each token decoded alone."""
    ids = byte_level().encode("漢🎉", add_special_tokens=False)
    assert "\ufffd" in "".join(byte_level().decode([token]) for token in ids)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    prompt_size=st.integers(1, 60),
    output_size=st.integers(1, 200),
    skip=st.booleans(),
)
def test_any_tokens(data, prompt_size, output_size, skip):
    """Random tokens, most of them broken characters: the sum of the pieces is the whole."""
    ids = st.integers(0, len(byte_level()) - 1)
    prompt = data.draw(st.lists(ids, min_size=prompt_size, max_size=prompt_size))
    output = data.draw(st.lists(ids, min_size=output_size, max_size=output_size))
    made = pieces(byte_level(), prompt, output, skip)
    assert "".join(made) == at_once(byte_level(), prompt, output, skip)
    decoder, _ = decoder_of(byte_level(), prompt, skip)
    assert decoder.add(output, finished=True) == "".join(made)


def num_bytes(tokenizer, ids) -> int:
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return len(ids) if tokenizer is not byte_level() else sum(map(len, tokens))


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=120), cut=st.integers(1, 40))
def test_any_text(make, text, cut):
    """The prompt may end inside a character: the output then begins with that character."""
    tokenizer = make()
    text = "xyz" + text + "."
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = min(cut, len(ids) - 1)
    in_prompt = text.encode()[: num_bytes(tokenizer, ids[:cut])].decode(errors="ignore")
    assert "".join(pieces(tokenizer, ids[:cut], ids[cut:])) == text[len(in_prompt) :]


def test_special_tokens():
    tokenizer = byte_level()
    hello, eos = tokenizer.encode("hello", add_special_tokens=False), tokenizer.eos_token_id
    output = [*hello, eos, *hello]
    assert "".join(pieces(tokenizer, [0], output, skip=True)) == "hellohello"
    assert "".join(pieces(tokenizer, [0], output, skip=False)) == "hello</s>hello"


def test_the_window_stays_small():
    decoder, _ = decoder_of(byte_level(), [5])
    longest = 0
    for tokens in (byte_level().encode("the end ", add_special_tokens=False) * 200, [200] * 500, [0] * 500):
        for token in tokens:
            decoder.add([token])
            longest = max(longest, len(decoder._window))
    assert longest <= 130


# --- stop strings -----------------------------------------------------------------------------------------------------


def letters() -> SimpleNamespace:
    """A token a letter, or several: ids index the list."""
    words = ["a", "b", "c", "d", "ab", "bc", "abc", "bcd", "x"]
    return SimpleNamespace(words=words, decode=lambda ids, **_: "".join(words[i] for i in ids))


def run(words: list[str], **kwargs) -> tuple[str, str | None, int]:
    """Text, stop string and tokens used."""
    tokenizer = letters()
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=99, **kwargs), [8])
    for i, word in enumerate(words):
        stop = detokenizer.add([tokenizer.words.index(word)])
        if stop is not None:
            return detokenizer.text, stop, i + 1
    return detokenizer.text, None, len(words)


@pytest.mark.parametrize("words", [["a", "b", "c", "d"], ["ab", "c", "d"], ["a", "bcd"], ["abc", "d"], ["ab", "bc"]])
def test_stop_string_across_tokens(words):
    text, stop, _ = run(["x", *words, "x"], stop="bc")
    assert (text, stop) == ("x" + "".join(words).split("bc")[0], "bc")
    text, stop, _ = run(["x", *words, "x"], stop="bc", include_stop_str_in_output=True)
    assert (text, stop) == ("x" + "".join(words).split("bc")[0] + "bc", "bc")


def test_the_stop_string_that_ends_first_counts_whatever_the_tokens():
    for words in (["a", "b", "c", "d"], ["abc", "d"], ["ab", "c", "d"], ["a", "bcd"]):
        assert run(words, stop=["abcd", "bc"])[:2] == ("a", "bc")
        assert run(words, stop=["bc", "abc"])[:2] == ("", "abc")


def test_min_tokens_completes_no_stop_string():
    assert run(["b", "c", "x", "b", "c"], stop="bc") == ("", "bc", 2)
    assert run(["b", "c", "x", "b", "c"], stop="bc", min_tokens=2) == ("bcx", "bc", 5)
    assert run(["b", "c", "x", "b", "c"], stop="bc", min_tokens=1) == ("", "bc", 2)
    assert run(["b", "c", "x"], stop="bc", min_tokens=3) == ("bcx", None, 3)


def test_several_tokens_in_one_step():
    detokenizer = Detokenizer(letters(), SamplingParams(stop="cb"), [8])
    assert detokenizer.add([0, 2, 1, 3]) == "cb"
    assert detokenizer.text == "a"


def test_stable_text_ends_before_what_may_be_a_stop_string():
    detokenizer = Detokenizer(letters(), SamplingParams(stop=["abcd", "cx"]), [8])
    stable = []
    for word in ("x", "a", "b", "c", "b", "a", "b"):
        assert detokenizer.add([letters().words.index(word)]) is None
        stable.append(detokenizer.text[: detokenizer.num_stable])
    assert stable == ["x", "x", "x", "x", "xabcb", "xabcb", "xabcb"]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 8), min_size=1, max_size=30),
    stop=st.lists(st.text("abcdx", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_by_the_definition(tokens, stop, include):
    """Against the whole text read letter by letter; and shown text is never taken back."""
    tokenizer = letters()
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop, include_stop_str_in_output=include), [8])
    shown, found = [], None
    for token in tokens:
        found = detokenizer.add([token])
        if found:
            break
        shown.append(detokenizer.text[: detokenizer.num_stable])
    whole = tokenizer.decode(tokens)
    expected, text = None, whole
    for end in range(1, len(whole) + 1):
        matches = [s for s in stop if whole[:end].endswith(s)]
        if matches:
            expected = max(matches, key=len)
            text = whole[: end if include else end - len(expected)]
            break
    assert (found, detokenizer.text) == (expected, text)
    assert all(text.startswith(part) for part in shown)


def test_a_fast_tokenizer_and_its_slow_path_agree():
    tokenizer = byte_level()
    wrapped = SimpleNamespace(decode=tokenizer.decode)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    texts = []
    for each in (tokenizer, wrapped):
        detokenizer = Detokenizer(each, SamplingParams(), ids[:1])
        for token in ids[1:]:
            detokenizer.add([token])
        texts.append(detokenizer.text)
    assert texts[0] == texts[1] == TEXT[1:]


# --- replacement characters: the model's own, and those of bytes that are not complete yet ----------------------------


def byte_tokens(tokenizer, data: bytes) -> list[int]:
    if tokenizer is slow():
        return [byte + 3 for byte in data]
    if tokenizer is byte_fallback():
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    alphabet = {token_bytes(tokenizer, i): i for i in range(len(tokenizer))}
    return [alphabet[bytes([byte])] for byte in data]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_continuation_bytes_are_found(make):
    tokenizer = make()
    found = continuation_ids(tokenizer)
    assert len(found) == 3
    for first in (b"\xc3", b"\xe0", b"\xe6", b"\xed", b"\xef", b"\xf0", b"\xf1", b"\xf4"):
        completed = [
            tokenizer.decode([*byte_tokens(tokenizer, first), *[i] * size]) for i in found for size in (1, 2, 3)
        ]
        assert any("\ufffd" not in text for text in completed), first


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
@pytest.mark.parametrize("rest", ["", "abc", "漢"])
def test_a_literal_replacement_character_is_text_at_once(make, rest):
    """Its bytes are complete, at the end of the output too, as in the tokenizer's own text of all tokens."""
    tokenizer = make()
    data = f"!x\ufffd{rest}".encode()
    ids = byte_tokens(tokenizer, data)
    made = pieces(tokenizer, ids[:1], ids[1:])
    assert made[:4] == (["x", "", "", "\ufffd"])
    assert "".join(made) == tokenizer.decode(ids)[1:] == f"x\ufffd{rest}"


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
@pytest.mark.parametrize("stop", ["x\ufffd", "\ufffd", "\ufffd\ufffd", "\ufffda"])
@pytest.mark.parametrize("at_end", [False, True])
def test_stop_strings_with_replacement_characters(make, stop, at_end):
    tokenizer = make()
    ids = byte_tokens(tokenizer, f"!yx\ufffd\ufffda{'' if at_end else 'bc'}".encode())
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=[stop]), ids[:1])
    text = "yx\ufffd\ufffda"
    end = text.index(stop) + len(stop)
    needed = len(text[:end].encode())
    for i, token in enumerate(ids[1:]):
        found = detokenizer.add([token], finished=i == len(ids) - 2)
        assert (found is not None) == (i + 1 == needed), f"after {text[:end]!r}, not sooner or later"
        if found:
            break
    assert found == stop
    assert detokenizer.text == text[: end - len(stop)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_incomplete_bytes_at_the_end_are_no_text(make):
    tokenizer = make()
    for data in (b"!a\xe6", b"!a\xe6\xbc", b"!a\xf0\x9f\x8e"):
        ids = byte_tokens(tokenizer, data)
        assert pieces(tokenizer, ids[:1], ids[1:]) == ["a"] + [""] * (len(data) - 2)
    ids = byte_tokens(tokenizer, b"!a\xff")
    assert pieces(tokenizer, ids[:1], ids[1:]) == ["a", "\ufffd"], "what nothing can complete is text"


# --- the text of single tokens ----------------------------------------------------------------------------------------


def token_texts(tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    token_text = TokenText(tokenizer, functools.cache(lambda: continuation_ids(tokenizer)))
    return [token_text(token, [*prompt, *output[:i]]) for i, token in enumerate(output)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_token_that_completes_a_character_has_it(make):
    tokenizer = make()
    ids = byte_tokens(tokenizer, "!a漢🎉é\ufffdb".encode())
    expected = ["a", "", "", "漢", "", "", "", "🎉", "", "é", "", "", "\ufffd", "b"]
    assert token_texts(tokenizer, ids[:1], ids[1:]) == expected
    assert token_texts(tokenizer, ids[:4], ids[4:]) == expected[3:], "the prompt ends inside the character"
    assert token_texts(tokenizer, [], ids) == ["!", *expected]
    # What could have come instead: a whole character, another last byte, a first byte, a byte that fits nowhere.
    token_text = TokenText(tokenizer, lambda: continuation_ids(tokenizer))
    first, last, bad = byte_tokens(tokenizer, b"\xe6\xbd\xff")
    assert [token_text(token, ids[:4]) for token in (ids[1], last)] == ["a", "漽"]
    assert [token_text(token, ids[:2]) for token in (first, bad)] == ["", "\ufffd"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=60), cut=st.integers(1, 20))
def test_the_texts_of_the_tokens_add_up(text, cut):
    tokenizer = byte_level()
    ids = tokenizer.encode("xyz" + text + ".", add_special_tokens=False)
    cut = min(cut, len(ids) - 1)
    assert "".join(token_texts(tokenizer, ids[:cut], ids[cut:])) == "".join(pieces(tokenizer, ids[:cut], ids[cut:]))
