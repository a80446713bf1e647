# SPDX-License-Identifier: Apache-2.0
"""How the next token of a request is chosen and when the request ends."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar

from vllm.inputs import check_text
from vllm.logger import init_logger
from vllm.utils.suggestions import nearest

logger = init_logger(__name__)

_GREEDY_BELOW = 1e-5
_LOWEST_TEMPERATURE = 1e-2
_MAX_N = 16384

# Parameters of older releases, each with the values that ask for nothing.
_RETIRED: dict[str, tuple[Any, ...]] = {
    "best_of": (None,),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "use_beam_search": (False, None),
    "length_penalty": (1.0, None),
    "early_stopping": (False, None),
}

_UNSUPPORTED = (
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "stream_interval",
    "skip_clone",
    "extra_args",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
    "routed_experts_prompt_start",
    "trace_decode_token_ids",
)


@dataclass
class StructuredOutputsParams:
    """What the output must be: exactly one of

    - ``json``: JSON of this schema, a dict or its text; ``json_object``: any JSON object;
    - ``regex``: a match of the whole expression, in the syntax of Rust's ``regex`` (no look-around, no references);
    - ``choice``: one of these strings;
    - ``grammar``: a text of this grammar, Lark as llguidance reads it or EBNF with ``::=`` from ``root``.

    Of JSON: ``disable_any_whitespace`` allows none between tokens, ``whitespace_pattern`` is what may stand there,
    ``disable_additional_properties`` closes objects that do not say. ``thinking_starts`` and ``thinking_ends``, token
    ids: see ``vllm.v1.structured_output.Matcher``.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    thinking_starts: int | None = None
    thinking_ends: int | None = None

    _KINDS: ClassVar[dict[str, tuple[Any, str]]] = {
        "json": ((str, dict), "a schema, as a dict or its text"),
        "regex": (str, "a string"),
        "choice": (list, "a list of strings"),
        "grammar": (str, "a string"),
        "json_object": (bool, "True"),
    }

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise NotImplementedError(
                f"structured_outputs: structural_tag={self.structural_tag!r} is not supported; use json or grammar"
            )
        if self.json_object is False:
            self.json_object = None
        if isinstance(self.choice, tuple):
            self.choice = list(self.choice)
        given = [name for name in self._KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly "
                f"one of {', '.join(self._KINDS)}"
            )
        types, wanted = self._KINDS[self.kind]
        value = getattr(self, self.kind)
        texts = self.choice if self.choice is not None else [value]
        empty = self.kind != "regex" and value in ("", [])
        if not isinstance(value, types) or empty or (self.choice and not all(isinstance(t, str) for t in self.choice)):
            raise ValueError(f"structured_outputs: {self.kind}={value!r} must be {wanted}, not empty")
        for text in texts:
            if isinstance(text, str):
                check_text(f"structured_outputs: {self.kind}", text)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("structured_outputs has whitespace_pattern and disable_any_whitespace; give one of them")

    @property
    def kind(self) -> str:
        return next(name for name in self._KINDS if getattr(self, name) is not None)


class RequestOutputKind(enum.Enum):
    """CUMULATIVE: each output holds all so far; DELTA: only what is new; FINAL_ONLY: one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _number(name: str, value: Any, allowed: str, good: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or not good(value):
        raise ValueError(f"{name}={value!r} must be a number {allowed}")


def _integer(name: str, value: Any, allowed: str, good: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not good(value):
        raise ValueError(f"{name}={value!r} must be an integer {allowed}")


def _token_ids(name: str, values: Iterable[Any]) -> list[int]:
    ids = list(dict.fromkeys(values))
    wrong = [value for value in ids if not isinstance(value, Integral) or isinstance(value, bool) or value < 0]
    if wrong:
        raise ValueError(f"{name} has {wrong!r}; give token ids, integers from 0 on")
    return [int(value) for value in ids]


def _strings(name: str, value: str | Iterable[str] | None) -> list[str]:
    strings = [] if value is None else [value] if isinstance(value, str) else list(dict.fromkeys(value))
    wrong = [text for text in strings if not isinstance(text, str) or not text]
    if wrong:
        raise ValueError(f"{name} has {wrong!r}; give strings that are not empty")
    return [check_text(name, text) for text in strings]


def check_truncation(value: Any) -> None:
    _integer("truncate_prompt_tokens", value, ">= 1, or -1", lambda v: v >= 1 or v == -1)


@dataclass(repr=False)
class SamplingParams:
    """Sampling parameters, with the names and defaults of upstream's release 0.33.

    - ``n``: completions per prompt; more than 1 needs ``temperature`` > 0.
    - ``presence_penalty``, ``frequency_penalty`` in [-2, 2]: subtracted from the logit of a token that was generated,
      once, and once per occurrence. ``repetition_penalty`` > 0: divides the logit, or multiplies a negative one, of a
      token in prompt or output (arXiv:1909.05858).
    - ``temperature`` >= 0 divides the logits, 0 is greedy. ``top_p`` in (0, 1], ``top_k`` (0 or -1: off) and
      ``min_p`` in [0, 1] (relative to the likeliest token) limit what may be sampled, in the order min_p, top_k, top_p.
    - ``seed``: own random stream of this request, whatever else is in the batch (-1 or None: the engine's).
    - ``stop`` strings and ``stop_token_ids`` end the request, as the model's end token does unless ``ignore_eos``.
      ``min_tokens`` forbids all of them before that many tokens. ``include_stop_str_in_output`` keeps the string.
    - ``max_tokens``: most tokens to generate; None: what ``max_model_len`` leaves.
    - ``logprobs``, ``prompt_logprobs``: so many of the likeliest tokens at each position, beside the chosen; -1: all.
    - ``logit_bias`` {token id: value in [-100, 100]} is added to the logits; only ``allowed_token_ids`` can be sampled;
      ``bad_words`` cannot be completed.
    - ``detokenize``, ``skip_special_tokens``, ``spaces_between_special_tokens``: the text of the output.
    - ``truncate_prompt_tokens``: keep the last so many prompt tokens; -1: as many as fit.
    - ``structured_outputs``: what the output must be, a ``StructuredOutputsParams`` or its fields as a dict.

    Raises ``ValueError`` for values out of range, ``TypeError`` for unknown names and ``NotImplementedError`` for
    upstream's parameters that this engine does not have.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    stream_interval: int | None = None
    skip_clone: bool = False
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    # Clients copy parameters through this name.
    __struct_fields__: ClassVar[tuple[str, ...]]

    bad_words_token_ids: list[list[int]] = field(default_factory=list, init=False, compare=False)

    def __new__(cls, *_args: Any, **kwargs: Any) -> SamplingParams:
        known = [f.name for f in dataclasses.fields(cls) if f.init]
        for name, value in kwargs.items():
            if name in known:
                continue
            if name not in _RETIRED:
                raise TypeError(f"SamplingParams has no parameter {name!r}{nearest(name, known)}")
            # best_of=n keeps every sequence that is sampled.
            if value not in _RETIRED[name] and not (name == "best_of" and value == kwargs.get("n", 1)):
                raise NotImplementedError(
                    f"SamplingParams({name}={value!r}) is not supported by this engine; leave it out"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in _UNSUPPORTED and value in (None, {}, []):
                setattr(self, f.name, f.default)
            elif f.name in _UNSUPPORTED and value != f.default:
                raise NotImplementedError(
                    f"SamplingParams({f.name}={value!r}) is not supported by this engine; leave it out"
                )
        self.stop = _strings("stop", self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids or [])
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=[] allows nothing; name at least one token or leave it out")
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias)
        self.structured_outputs = structured_params(self.structured_outputs)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is True:
                setattr(self, name, 1)
            elif value is not None:
                _integer(name, value, ">= 0, or -1 for the whole vocabulary", lambda v: v >= -1)
        if self.seed is not None:
            _integer("seed", self.seed, "or None", lambda v: -(2**63) <= v < 2**64)
            self.seed = None if self.seed == -1 else int(self.seed)
        self._check_numbers()
        if self.temperature < _GREEDY_BELOW:
            if self.n > 1:
                raise ValueError(
                    f"n={self.n} with temperature=0 gives {self.n} equal texts; use n=1 or a temperature > 0"
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < _LOWEST_TEMPERATURE:
            logger.warning("temperature=%s is raised to %s, the lowest", self.temperature, _LOWEST_TEMPERATURE)
            self.temperature = _LOWEST_TEMPERATURE
        self.top_k = min(max(self.top_k, 0), 2**31 - 1)  # more than any vocabulary: off

    def _check_numbers(self) -> None:
        _integer("n", self.n, f"from 1 to {_MAX_N}", lambda v: 1 <= v <= _MAX_N)
        _number("presence_penalty", self.presence_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
        _number("frequency_penalty", self.frequency_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
        _number("repetition_penalty", self.repetition_penalty, "> 0; 1 is off", lambda v: v > 0)
        _number("temperature", self.temperature, ">= 0; 0 is greedy", lambda v: v >= 0)
        _number("top_p", self.top_p, "in (0, 1]; 1 is off", lambda v: 0 < v <= 1)
        _integer("top_k", self.top_k, ">= 1; 0 or -1 is off", lambda v: v >= -1)
        _number("min_p", self.min_p, "in [0, 1]; 0 is off", lambda v: 0 <= v <= 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, ">= 1, or None for as many as fit", lambda v: v >= 1)
        _integer("min_tokens", self.min_tokens, ">= 0", lambda v: v >= 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"a request of max_tokens={self.max_tokens} never has min_tokens={self.min_tokens} tokens")
        if self.truncate_prompt_tokens is not None:
            check_truncation(self.truncate_prompt_tokens)
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs text; set detokenize=True or use stop_token_ids")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be one of {[str(k) for k in RequestOutputKind]}")

    def verify(self, vocab_size: int, max_logprobs: int = -1) -> None:
        """Raise ``ValueError`` where ids or counts do not fit the model; ``max_logprobs`` -1 is no limit."""
        ids = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": self.logit_bias,
            "bad_words": [token for word in self.bad_words_token_ids for token in word],
        }
        for name, values in ids.items():
            wrong = [value for value in values or () if value >= vocab_size]
            if wrong:
                raise ValueError(f"{name} has token ids {wrong[:10]} outside the model's vocabulary of {vocab_size}")
        if max_logprobs >= 0:
            for name in ("logprobs", "prompt_logprobs"):
                value = getattr(self, name)
                if value is not None and (vocab_size if value == -1 else value) > max_logprobs:
                    raise ValueError(f"{name}={value} exceeds max_logprobs={max_logprobs}; lower it or raise the limit")

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Set ``bad_words_token_ids``: each word as it is written at the start of a text and after a space."""
        self.bad_words_token_ids = []
        for word in self.bad_words or ():
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = list(tokenizer.encode(text, add_special_tokens=False))
                if ids and ids not in self.bad_words_token_ids:
                    self.bad_words_token_ids.append(ids)

    @property
    def is_penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def clone(self) -> SamplingParams:
        """An independent copy: the engine completes its own, never the caller's, which many prompts may share."""
        return copy.deepcopy(self)

    @staticmethod
    def from_optional(**kwargs: Any) -> SamplingParams:
        """Like the constructor, but None means the default where None is no value of its own."""
        defaults = vars(_DEFAULTS)
        given: dict[str, Any] = {
            name: defaults.get(name) if value is None and name != "max_tokens" else value
            for name, value in kwargs.items()
        }
        return SamplingParams(**given)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        defaults = vars(_DEFAULTS)
        return f"SamplingParams({', '.join(f'{k}={v!r}' for k, v in shown.items() if v != defaults[k])})"


def structured_params(given: Any) -> StructuredOutputsParams | None:
    """``given`` may be a dict of the fields; raises ``ValueError`` for one that is none of them."""
    if given is None or given == {} or isinstance(given, StructuredOutputsParams):
        return given or None
    if not isinstance(given, dict):
        raise ValueError(f"structured_outputs={given!r} is a {type(given).__name__}; give a StructuredOutputsParams")
    known = [f.name for f in dataclasses.fields(StructuredOutputsParams)]
    for name in given:
        if name not in known:
            raise ValueError(f"structured_outputs has no {name!r}{nearest(name, known)}")
    return StructuredOutputsParams(**given)


def _bias(logit_bias: dict[Any, Any]) -> dict[int, float]:
    """JSON's string keys become token ids; values are held to OpenAI's range of ±100."""
    try:
        by_id = {int(token): value for token, value in logit_bias.items()}
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias has keys that are no token ids: {list(logit_bias)[:10]}") from None
    for token_id, value in by_id.items():
        _integer("logit_bias key", token_id, ">= 0", lambda v: v >= 0)
        if value not in (math.inf, -math.inf):
            _number(f"logit_bias[{token_id}]", value, "", lambda _: True)
    return {token_id: sorted((-100.0, float(value), 100.0))[1] for token_id, value in by_id.items()}


def _accept_retired(init: Any) -> Any:
    """``__init__`` without the retired parameters, which ``__new__`` has checked."""

    @functools.wraps(init)
    def wrapped(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: value for name, value in kwargs.items() if name not in _RETIRED})

    return wrapped


SamplingParams.__struct_fields__ = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.init)
SamplingParams.__init__ = _accept_retired(SamplingParams.__init__)  # type: ignore[method-assign]
_DEFAULTS = SamplingParams()


@dataclass
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``.

    ``temperature`` > 0 divides the logits where ``logprobs_mode`` is a processed one. ``length_penalty``: the exponent
    of the output's length by which log-probabilities are divided to compare sequences; the end token counts.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, ">= 1", lambda v: v >= 1)
        _integer("max_tokens", self.max_tokens, ">= 1", lambda v: v >= 1)
        _number("temperature", self.temperature, ">= 0", lambda v: v >= 0)
        _number("length_penalty", self.length_penalty, "", lambda _: True)
