# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters of the rows of the running batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from math import inf, log
from typing import Any

import numpy as np
import torch

from vllm.kernels.reference_sampling import random_bits
from vllm.v1.request import Request
from vllm.v1.sample.metadata import AllowedTokens, Penalties, SamplingMetadata, TokenEntries
from vllm.v1.structured_output import Matcher
from vllm.v1.transfers import PersistentBuffer, Staging, Stream, to_device


class _SeenTokens:
    """The distinct tokens of prompt and output, and how often each is in the output; grows with the request."""

    def __init__(self, request: Request) -> None:
        prompt = np.unique(np.asarray(request.prompt_token_ids, dtype=np.int64))
        self.size = len(prompt)
        self.tokens = np.resize(prompt, 2 * self.size + 64)
        self.counts = np.zeros(len(self.tokens), dtype=np.float32)
        self._index = {token: i for i, token in enumerate(prompt.tolist())}
        self._num_read = len(request.prompt_token_ids)

    def read(self, all_token_ids: list[int]) -> None:
        """Count the output tokens that are new since the last call."""
        for token in all_token_ids[self._num_read :]:
            i = self._index.setdefault(token, self.size)
            if i == self.size:
                if i == len(self.tokens):
                    self.tokens = np.resize(self.tokens, 2 * i)
                    self.counts = np.concatenate((self.counts, np.zeros(i, dtype=np.float32)))
                self.tokens[i] = token
                self.size += 1
            self.counts[i] += 1
        self._num_read = len(all_token_ids)


class _Row:
    """One request: its parameters, and what of them depends on the tokens so far."""

    def __init__(self, request: Request, seed: int) -> None:
        params = request.sampling_params
        self.request = request
        self.params = params
        self.seed = seed
        self.greedy = params.temperature == 0
        end = () if request.eos_token_id is None else (request.eos_token_id,)
        self.end_token_ids = list({*end, *(params.stop_token_ids or ())}) if params.min_tokens else []
        self.seen = _SeenTokens(request) if params.is_penalised else None
        self.plain = (
            self.greedy
            and not params.is_penalised
            and not self.end_token_ids
            and not params.bad_words_token_ids
            and not params.logit_bias
            and params.allowed_token_ids is None
            and params.logprobs is None
            and request.matcher is None
        )

    def banned_token_ids(self, num_output: int) -> list[int]:
        """End tokens before ``min_tokens``, and last tokens of bad words whose other tokens were just generated."""
        num_prompt = len(self.request.prompt_token_ids)
        output = self.request.all_token_ids[num_prompt:]
        banned = set(self.end_token_ids) if num_output < self.params.min_tokens else set()
        for word in self.params.bad_words_token_ids:
            before = word[:-1]
            if len(before) <= len(output) and output[len(output) - len(before) :] == before:
                banned.add(word[-1])
        return list(banned)

    def why_undrawable(self) -> str:
        """Why no token could be drawn for the next position, in words for the client."""
        params = self.params
        reasons = []
        if self.request.matcher is not None:
            reasons.append(self.request.matcher.why_none())
        if params.allowed_token_ids is not None:
            reasons.append(f"allowed_token_ids={_few(params.allowed_token_ids)}")
        if self.request.num_output_tokens < params.min_tokens and self.end_token_ids:
            reasons.append(f"min_tokens={params.min_tokens} forbids the end tokens {_few(self.end_token_ids)}")
        if params.bad_words_token_ids:
            reasons.append(f"bad_words={params.bad_words} forbid what would complete them")
        if self.seen is not None:
            reasons.append(
                f"repetition_penalty={params.repetition_penalty}, frequency_penalty={params.frequency_penalty} and "
                f"presence_penalty={params.presence_penalty} change the logits"
            )
        return (
            f"no token can be drawn at output position {self.request.num_output_tokens}: "
            f"{'; '.join(reasons) or 'the model gives every token the probability 0'}; loosen one of them"
        )


def _signed(bits: int) -> int:
    """The low 64 bits as int64 has them."""
    return (bits + 2**63) % 2**64 - 2**63


def _few(token_ids: list[int]) -> str:
    return str(token_ids) if len(token_ids) <= 10 else f"{str(token_ids[:10])[:-1]}, ...] ({len(token_ids)})"


class SamplingState:
    """Sampling parameters by row of the running batch; ``make_metadata`` turns them into a step's tensors.

    ``seed`` is the engine's: the seeds of requests that have none of their own follow from it and from the order in
    which they came, so that ranks that add the same requests sample the same tokens.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        stream: Stream | None = None,
    ) -> None:
        self.vocab_size, self._engine_seed = vocab_size, seed
        self.device = torch.device(device)
        self._rows: list[_Row | None] = [None] * max_num_reqs
        self._num_unseeded = 0
        self._cached: SamplingMetadata | None = None
        self._key: tuple[int, ...] | None = None
        self._chosen: list[_Row] = []
        self._penalised: list[tuple[int, _Row, _SeenTokens]] = []
        self._banning: list[tuple[int, _Row]] = []
        self._matching: list[tuple[int, Matcher]] = []
        self._history = False
        self._staging = Staging(stream or Stream(self.device))
        num_words = -(-vocab_size // 32)
        self._words = PersistentBuffer(max_num_reqs, torch.int32, 0, self._staging, num_words)
        self._rates: tuple[torch.Tensor, ...] = ()

    def add_row(self, row: int, request: Request) -> None:
        """Put ``request`` into the free ``row``."""
        assert self._rows[row] is None, f"row {row} holds {self._rows[row].request.request_id}"  # type: ignore[union-attr]
        seed = request.sampling_params.seed
        if seed is None:
            if request.drawn_seed is None:
                place = np.array([[_signed(self._engine_seed)], [self._num_unseeded]])
                request.drawn_seed = int(random_bits(*place)[0])
                self._num_unseeded += 1
            seed = request.drawn_seed
        self._rows[row] = _Row(request, _signed(seed))
        self._cached = None

    def remove_row(self, row: int) -> None:
        assert self._rows[row] is not None, f"row {row} is free"
        self._rows[row] = None
        self._cached = None

    def make_metadata(
        self, rows: Sequence[int] | None = None, num_outputs: Callable[[], Sequence[int]] | None = None
    ) -> SamplingMetadata:
        """The metadata of ``rows`` in that order, or of all occupied rows, which then must be 0 .. n-1.

        ``num_outputs`` tells how many tokens each has sampled; by default those that its request has. Reads the
        requests' tokens as they are now (``Request.reads_tokens`` says which may lack none). The same object comes back
        while nothing changed.
        """
        key = None if rows is None else tuple(rows)
        if self._cached is None or key != self._key:
            self._cached = self._build(key)
            self._key = key
        if not self._history:
            return self._cached
        counts = [row.request.num_output_tokens for row in self._chosen] if num_outputs is None else num_outputs()
        return dataclasses.replace(self._cached, **self._from_history(counts))

    def chosen(self) -> Sequence[_Row]:
        """What the last metadata was made of, row by row."""
        return self._chosen

    def _select(self, key: tuple[int, ...] | None) -> list[_Row]:
        if key is None:
            chosen = [row for row in self._rows if row is not None]
            assert all(row is not None for row in self._rows[: len(chosen)]), "occupied rows are not 0 .. n-1"
            return chosen
        chosen = [row for row in (self._rows[i] for i in key) if row is not None]
        assert len(chosen) == len(key), f"rows {[i for i in key if self._rows[i] is None]} are free"
        return chosen

    def _build(self, key: tuple[int, ...] | None) -> SamplingMetadata:
        """All that does not depend on the requests' output."""
        self._chosen = chosen = self._select(key)
        self._history = False
        if all(row.plain for row in chosen):
            return SamplingMetadata()
        params = [row.params for row in chosen]
        counts = [p.logprobs for p in params if p.logprobs is not None]
        fields: dict[str, Any] = {
            "max_num_logprobs": None if not counts else -1 if -1 in counts else max(counts),
            "allowed": [
                (r, self._tensor(p.allowed_token_ids, torch.int64))
                for r, p in enumerate(params)
                if p.allowed_token_ids is not None
            ],
        }
        bias = [(r, token, value) for r, p in enumerate(params) for token, value in (p.logit_bias or {}).items()]
        if bias:
            fields["bias"] = self._entries((r, token) for r, token, _ in bias)
            fields["bias_values"] = self._tensor([value for _, _, value in bias], torch.float32)
        if not all(row.greedy for row in chosen):
            fields |= self._random_fields(chosen)
        self._penalised = [(r, row, row.seen) for r, row in enumerate(chosen) if row.seen is not None]
        if self._penalised:
            rates = zip(*((p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params), strict=True)
            self._rates = tuple(self._tensor(values, torch.float32) for values in rates)
        self._banning = [
            (r, row) for r, row in enumerate(chosen) if row.end_token_ids or row.params.bad_words_token_ids
        ]
        self._matching = [(r, row.request.matcher) for r, row in enumerate(chosen) if row.request.matcher is not None]
        self._history = "temperature" in fields or bool(self._penalised or self._banning or self._matching)
        return SamplingMetadata(**fields)

    def _random_fields(self, chosen: list[_Row]) -> dict[str, Any]:
        params = [row.params for row in chosen]
        fields: dict[str, Any] = {
            "temperature": self._tensor([p.temperature for p in params], torch.float32),
            "seeds": self._tensor([row.seed for row in chosen], torch.int64),
        }
        top_k = [min(p.top_k or self.vocab_size, self.vocab_size) for p in params]
        if min(top_k) < self.vocab_size:
            fields["top_k"] = self._tensor(top_k, torch.int64)
        if any(p.top_p < 1 for p in params):
            fields["top_p"] = self._tensor([p.top_p for p in params], torch.float32)
        if any(p.min_p for p in params):
            fields["log_min_p"] = self._tensor([log(p.min_p) if p.min_p else -inf for p in params], torch.float32)
        return fields

    def _from_history(self, num_outputs: Sequence[int]) -> dict[str, Any]:
        """All that depends on the requests' output so far."""
        fields: dict[str, Any] = {}
        if self._cached is not None and self._cached.temperature is not None:
            fields["positions"] = self._tensor(num_outputs, torch.int64)
        banned = [(r, token) for r, row in self._banning for token in row.banned_token_ids(num_outputs[r])]
        if banned:
            fields["banned"] = self._entries(banned)
        if self._penalised:
            fields["penalties"] = self._penalties(self._penalised)
        if self._matching:
            fields["grammar"] = self._allowed_tokens(self._matching)
        return fields

    def _penalties(self, penalised: list[tuple[int, _Row, _SeenTokens]]) -> Penalties:
        for _, row, seen in penalised:
            seen.read(row.request.all_token_ids)
        starts = np.zeros(len(self._chosen) + 1, dtype=np.int32)
        starts[[r + 1 for r, _, _ in penalised]] = [seen.size for _, _, seen in penalised]
        tokens = np.concatenate([seen.tokens[: seen.size] for _, _, seen in penalised])
        counts = np.concatenate([seen.counts[: seen.size] for _, _, seen in penalised])
        seen_by_row = (np.cumsum(starts, dtype=np.int32), tokens, counts)
        return Penalties(*(to_device(torch.from_numpy(x), self.device) for x in seen_by_row), *self._rates)

    def _allowed_tokens(self, matching: list[tuple[int, Matcher]]) -> AllowedTokens:
        with self._staging.filling():
            words = self._words.array
            for i, (_, matcher) in enumerate(matching):
                matcher.fill(words[i])
            return AllowedTokens(self._tensor([r for r, _ in matching], torch.int64), self._words.upload(len(matching)))

    def _entries(self, pairs: Iterable[tuple[int, int]]) -> TokenEntries:
        rows, tokens = self._tensor(list(zip(*pairs, strict=True)), torch.int64)
        return TokenEntries(rows, tokens)

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)
