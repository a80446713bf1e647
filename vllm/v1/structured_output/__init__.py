# SPDX-License-Identifier: Apache-2.0
"""Output held to a grammar: which tokens may come next, from llguidance, as bits that the sampler reads.

The front end checks a request's grammar (``Grammars.check``), so that a wrong one costs its sender an answer and no
step. Each rank makes its own ``Matcher`` of it, asks it for the allowed tokens before a token is sampled and tells it
the token. llguidance works with limits: what a request may cost a step is bounded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

MAX_GRAMMAR_BYTES = 256 << 10
_END = "<|end of what a grammar describes|>"
_NUM_KEPT = 32
# Of 1 to 2 kB each. What a step may cost is llguidance's default: some 15 ms a request.
_MAX_STATES = 50_000


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError("structured outputs need the package llguidance; pip install llguidance") from None
    return llguidance


def as_text(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """``params`` with the JSON schema as text, as it travels to the ranks."""
    if params.json is None or isinstance(params.json, str):
        return params
    try:
        return dataclasses.replace(params, json=json.dumps(params.json, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: the schema cannot be written as JSON: {error}") from None


def grammar_text(params: StructuredOutputsParams) -> str:
    """llguidance's text of the grammar. Raises ``ValueError`` for what is no JSON, and for a grammar too large."""
    matcher = _llguidance().LLMatcher
    kind, value = params.kind, getattr(as_text(params), params.kind)
    size = len(json.dumps(value))
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(
            f"structured_outputs: {kind} of {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken, make it smaller"
        )
    if kind == "regex":
        return matcher.grammar_from_regex(value)
    if kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in value)
        return matcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    if kind == "grammar":
        if "::=" in value:
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                value = any_to_lark(value)
            except Exception as error:  # its reader fails in many ways
                raise ValueError(f"structured_outputs: the EBNF grammar cannot be read: {error}") from None
        return matcher.grammar_from_lark(value)
    try:
        schema = {"type": "object"} if kind == "json_object" else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: the schema is no JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"structured_outputs: the schema {value[:100]!r} is a {type(schema).__name__}, not an object")
    if params.disable_additional_properties:
        _close_objects(schema)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return matcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _close_objects(schema: Any) -> None:
    """Objects in ``schema`` that say nothing about it have no other properties."""
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _close_objects(value)
    if isinstance(schema, dict) and (schema.get("type") == "object" or isinstance(schema.get("properties"), dict)):
        schema.setdefault("additionalProperties", False)


_making = threading.Lock()


@functools.lru_cache(2)
def _tokenizer_of(text: str, end: int) -> Any:
    """llguidance's: threads with a copy of one tokenizer each share it."""
    return _llguidance().LLTokenizer(text, n_vocab=end + 1, eos_token=end)


class Grammars:
    """The grammars of one tokenizer, which ``load`` gives when the first request needs one: making llguidance's takes
    a second or so."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._made: Any = None
        self._pristine = functools.lru_cache(_NUM_KEPT)(self._make_matcher)

    @classmethod
    def of_model(cls, config: Any) -> Grammars:
        """Of the tokenizer that the model's config names."""

        def load() -> Any:
            from vllm.tokenizers import tokenizer_of

            return tokenizer_of(config)

        return cls(load)

    def _tokenizer(self) -> Any:
        """llguidance's, with an end of its own: which tokens end a request is each request's matter."""
        with _making:
            if self._made is None:
                tokenizer = self._load()
                if tokenizer is None:
                    raise ValueError(
                        "structured_outputs need a tokenizer, and skip_tokenizer_init=True; make the engine without it"
                    )
                backend = getattr(tokenizer, "backend_tokenizer", None)
                if backend is None:
                    raise ValueError(
                        f"structured_outputs need a fast tokenizer, and this is a {type(tokenizer).__name__}; leave "
                        "out tokenizer_mode='slow', or save the tokenizer as tokenizer.json"
                    )
                from tokenizers import Tokenizer

                backend = Tokenizer.from_str(backend.to_str())
                backend.no_padding()
                backend.no_truncation()
                backend.add_special_tokens([_END])
                end = backend.get_vocab_size() - 1
                assert backend.token_to_id(_END) == end, f"{_END!r} is token {backend.token_to_id(_END)}, not {end}"
                self._made = _tokenizer_of(backend.to_str(), end)
            return self._made

    def _make_matcher(self, grammar: str) -> Any:
        limits = _llguidance().LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
        matcher = _llguidance().LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {matcher.get_error().strip()}")
        return matcher

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises ``ValueError``, with llguidance's words, for what no matcher can be made of."""
        self._pristine(grammar_text(params))

    def matcher(self, request: Request) -> Matcher:
        """A matcher before the first token of ``request``; raises as ``check`` does."""
        params = request.sampling_params
        assert params.structured_outputs is not None, f"request {request.request_id} has no structured_outputs"
        ends = set(params.stop_token_ids or ())
        if request.eos_token_id is not None and not params.ignore_eos:
            ends.add(request.eos_token_id)
        pristine = self._pristine(grammar_text(params.structured_outputs))
        own_end = self._tokenizer().eos_token
        return Matcher(pristine.deep_copy(), own_end, ends, params.structured_outputs)


class Matcher:
    """Where one request is in its grammar.

    Tokens that end a request are allowed where the grammar may end, and where it has them as text. With
    ``params.thinking_ends`` the grammar begins after that token: any text but no end comes before it, once
    ``thinking_starts`` was the first token or, if that is None, from the start.
    """

    def __init__(
        self, matcher: Any, own_end: int, end_token_ids: Iterable[int], params: StructuredOutputsParams
    ) -> None:
        self._matcher, self._own_end, self._ends = matcher, own_end, list(end_token_ids)
        self._thinking_starts, self._thinking_ends = params.thinking_starts, params.thinking_ends
        self._is_thinking = params.thinking_ends is not None and params.thinking_starts is None
        self._kind = params.kind
        self._allowed = np.zeros(0, dtype=np.uint32)
        self.num_taken = 0

    @property
    def error(self) -> str:
        return self._matcher.get_error().strip()

    @property
    def is_over(self) -> bool:
        """Nothing can follow, not even a token that ends the request, as it has none."""
        return not self._ends and not self._is_thinking and self._matcher.is_stopped()

    def fill(self, words: np.ndarray) -> None:
        """Write the tokens that may come next to ``words`` [ceil(V / 32)] int32: bit t % 32 of word t // 32."""
        words = words.view(np.uint32)
        if self._is_thinking:
            words[:] = 2**32 - 1
            _set(words, self._ends, False)
        else:
            allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: len(words)]
            words[: len(allowed)] = allowed
            words[len(allowed) :] = 0
            _set(words, self._own_end, False)
            if self._matcher.is_accepting():
                _set(words, self._ends, True)
            if self.num_taken == 0 and self._thinking_starts is not None:
                _set(words, self._thinking_starts, True)
        self._allowed = words.copy()

    def take(self, token_id: int, ends: bool) -> bool:
        """Go on with ``token_id``, which ``ends`` the request or not; False where a limit of llguidance ends the
        matcher, see ``error``."""
        word, bit = divmod(token_id, 32)
        assert self._allowed[word : word + 1] >> bit & 1, (
            f"token {token_id} was sampled at output position {self.num_taken}, where the {self._kind} of the request "
            f"allows {self._few()}"
        )
        first = self.num_taken == 0
        self.num_taken += 1
        if self._is_thinking:
            self._is_thinking = token_id != self._thinking_ends
            return True
        if first and token_id == self._thinking_starts:
            self._is_thinking = True
            return True
        return ends or self._matcher.consume_token(token_id)

    def why_none(self) -> str:
        """In words for the client: what the grammar allows here."""
        if self.error:
            return f"structured_outputs: {self._kind}: {self.error}"
        return f"structured_outputs: {self._kind} allows only {self._few()}"

    def _few(self) -> str:
        bits = np.unpackbits(self._allowed.view(np.uint8), bitorder="little").nonzero()[0]
        return f"{len(bits)} tokens{f' ({bits[:10].tolist()})' if len(bits) else ''}"


def _set(words: np.ndarray, token_ids: Any, value: bool) -> None:
    ids = np.atleast_1d(np.asarray(token_ids, dtype=np.int64))
    ids = ids[ids < 32 * len(words)]
    bits = np.uint32(1) << (ids % 32).astype(np.uint32)
    if value:
        np.bitwise_or.at(words, ids // 32, bits)
    else:
        np.bitwise_and.at(words, ids // 32, ~bits)
