# SPDX-License-Identifier: Apache-2.0
"""``/v1/completions``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from vllm.entrypoints.openai.chat_answer import structure_of
from vllm.entrypoints.openai.errors import APIError
from vllm.entrypoints.openai.protocol import CompletionRequest
from vllm.entrypoints.openai.serving import Job, Serving, Usage, choice_end, finite, prompt_logprobs_json
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

_SAYS = ("text", "finish_reason", "logprobs", "token_ids")  # a chunk with none of them is left out


class ServingCompletion:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    async def make_job(self, raw: Request, request: CompletionRequest) -> Job:
        serving = self.serving
        serving.check_model(request.model)
        if request.max_tokens == 0 and not request.echo:
            raise APIError(400, "max_tokens=0 gives nothing without echo=true; give at least 1", "max_tokens")
        prompts = request.prompts(serving.args.max_sequences_per_request)
        params = request.sampling_params(
            serving.defaults,
            max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
            logprobs=request.logprobs,
            structured_outputs=structure_of(request),
            # The log-probabilities of an echoed prompt are those of its tokens.
            **({"prompt_logprobs": request.logprobs} if request.echo and request.prompt_logprobs is None else {}),
        )
        add_special_tokens = request.add_special_tokens is None or request.add_special_tokens
        kwargs = {"add_special_tokens": add_special_tokens}
        inputs = await serving.in_thread(serving.check_prompts, prompts, params, kwargs)
        return serving.make_job("cmpl", raw, request, params, inputs)

    async def answer(self, request: CompletionRequest, job: Job) -> dict[str, Any]:
        usage, choices = Usage(job), []
        for number, output in enumerate(await self.serving.final_outputs(job)):
            self._drop_unasked(request, output)
            usage.add(number, output)
            for completion in output.outputs:
                choices.append(self._choice(request, job, number, output, completion, None))
        return {**_head(job), "choices": choices, "usage": usage.json()}

    async def chunks(self, request: CompletionRequest, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        usage, head = Usage(job), _head(job)
        options = request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        begun: dict[int, int] = {}  # choice → the characters that were sent of it
        prompt_rows: dict[int, Any] = {}
        async with contextlib.aclosing(self.serving.outputs(job)) as outputs:
            async for number, output in outputs:
                self._drop_unasked(request, output)
                usage.add(number, output)
                # They come once, and each of n choices begins with them.
                output.prompt_logprobs = prompt_rows.setdefault(number, output.prompt_logprobs)
                for completion in output.outputs:
                    index = number * job.params.n + completion.index
                    choice = self._choice(request, job, number, output, completion, begun.get(index))
                    begun[index] = begun.get(index, 0) + len(choice["text"])
                    if continuous or any(
                        choice.get(name) for name in ("text", "finish_reason", "logprobs", "token_ids")
                    ):
                        yield {**head, "choices": [choice], **({"usage": usage.json()} if continuous else {})}
        if options and options.include_usage:
            yield {**head, "choices": [], "usage": usage.json()}

    def _drop_unasked(self, request: CompletionRequest, output: RequestOutput) -> None:
        """``max_tokens=0`` runs one token, which nobody asked for."""
        for completion in output.outputs if request.max_tokens == 0 else ():
            completion.text, completion.token_ids, completion.logprobs = "", [], completion.logprobs and []
            completion.finish_reason, completion.stop_reason = "length", None

    def _choice(
        self,
        request: CompletionRequest,
        job: Job,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        num_sent: int | None,
    ) -> dict[str, Any]:
        """``num_sent``: characters of this choice that the client has; None: it has nothing of it."""
        text, token_ids, rows = completion.text, list(completion.token_ids), completion.logprobs
        prompt_ids = job.inputs[number].prompt_token_ids
        first = num_sent is None
        if request.echo and first:
            prompt = output.prompt
            if prompt is None:
                tokenizer = self.serving.tokenizer
                prompt = "" if tokenizer is None else tokenizer.decode(prompt_ids)
            text = prompt + text
        choice: dict[str, Any] = {
            "index": number * job.params.n + completion.index,
            "text": text,
            "logprobs": None,
            **choice_end(completion),
        }
        if request.logprobs is not None:
            shown, shown_ids = list(rows or ()), token_ids
            if request.echo and first:
                shown, shown_ids = [*(output.prompt_logprobs or ()), *shown], [*prompt_ids, *token_ids]
            choice["logprobs"] = self._logprobs(request, shown_ids, shown, num_sent or 0)
        if not request.stream and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = prompt_ids if first else None
        return choice

    def _logprobs(
        self,
        request: CompletionRequest,
        token_ids: Sequence[int],
        rows: Sequence[Mapping[int, Logprob] | None],
        offset: int,
    ) -> dict[str, Any]:
        """OpenAI's four lists. ``offset``: the characters before the first token's."""
        tokens, chosen, tops, offsets = [], [], [], []
        for token_id, row in zip(token_ids, rows, strict=True):
            logprob = row.get(token_id) if row else None
            name = self.serving.token_name(token_id, logprob, request)
            tokens.append(name)
            chosen.append(None if logprob is None else finite(logprob.logprob))
            top: dict[str, float] = {}
            for other_id, other in (row or {}).items():
                text = self.serving.token_name(other_id, other, request)
                top[text] = max(top.get(text, other.logprob), finite(other.logprob))  # several may have one text
            tops.append(top if row else None)
            offsets.append(offset)
            offset += len(name)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": tops}


def _head(job: Job) -> dict[str, Any]:
    return {"id": job.request_id, "object": "text_completion", "created": job.created, "model": job.model}
