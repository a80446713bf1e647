# SPDX-License-Identifier: Apache-2.0
"""``/v1/chat/completions``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request

from vllm.entrypoints.openai.chat_answer import ChatAnswer, Plan
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.serving import Job, Serving, Usage, finite, prompt_logprobs_json
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput


class ServingChat:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    async def make_job(self, raw: Request, request: ChatCompletionRequest) -> Job:
        serving = self.serving
        serving.check_model(request.model)
        plan = Plan(request, serving.args)
        completion_tokens = request.max_completion_tokens
        params = request.sampling_params(
            serving.defaults,
            max_tokens=request.max_tokens if completion_tokens is None else completion_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

        def check() -> Any:
            prompt = serving.render(request)
            plan.prepare(params, prompt.get("prompt") or "", serving.thread_tokenizer())
            return serving.check_prompts([prompt], params, {})

        return serving.make_job("chatcmpl", raw, request, params, await serving.in_thread(check))

    async def answer(self, request: ChatCompletionRequest, job: Job) -> dict[str, Any]:
        usage, choices, plan = Usage(job), [], Plan(request, self.serving.args)
        (output,) = await self.serving.final_outputs(job)
        usage.add(0, output)
        for completion in output.outputs:
            parsed = plan.answer(job.inputs[0].prompt or "")
            message = {"role": self.serving.args.response_role, **parsed.message(completion)}
            if echoed := self._echoed(request):
                message["content"] = echoed + (message.get("content") or "")
            choice = {
                "index": completion.index,
                "message": message,
                "logprobs": self._logprobs(request, completion),
                **parsed.end(completion),
            }
            if request.return_token_ids:
                choice["token_ids"] = list(completion.token_ids)
            choices.append(choice)
        extra: dict[str, Any] = {}
        if request.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs_json(output.prompt_logprobs)
        if request.return_token_ids:
            extra["prompt_token_ids"] = job.inputs[0].prompt_token_ids
        return {**_head(job, "chat.completion"), "choices": choices, "usage": usage.json(), **extra}

    async def chunks(self, request: ChatCompletionRequest, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        usage, head = Usage(job), _head(job, "chat.completion.chunk")
        options = request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        answers: dict[int, ChatAnswer] = {}
        plan = Plan(request, self.serving.args)

        def chunk(index: int, delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
            return {**head, "choices": [choice], **({"usage": usage.json()} if continuous else {})}

        async with contextlib.aclosing(self.serving.outputs(job)) as outputs:
            async for number, output in outputs:
                usage.add(number, output)
                for completion in output.outputs:
                    index = completion.index
                    if index not in answers:
                        answers[index] = plan.answer(job.inputs[0].prompt or "")
                        first: dict[str, Any] = {}
                        if request.return_token_ids:
                            first["prompt_token_ids"] = job.inputs[0].prompt_token_ids
                        role = self.serving.args.response_role
                        yield chunk(index, {"role": role, "content": self._echoed(request)}, **first)
                    delta, logprobs = answers[index].delta(completion), self._logprobs(request, completion)
                    end = answers[index].end(completion) if completion.finished() else {}
                    ids = {"token_ids": list(completion.token_ids)} if request.return_token_ids else {}
                    if delta or end or logprobs or ids or continuous:
                        yield chunk(index, delta, logprobs=logprobs, **end, **ids)
        if options and options.include_usage:
            yield {**head, "choices": [], "usage": usage.json()}

    def _echoed(self, request: ChatCompletionRequest) -> str:
        """With ``echo``, the content of the last message, which the answer continues."""
        last = (request.messages or [{}])[-1]
        content = last.get("content")
        if not request.echo or last.get("role") != self.serving.args.response_role or not content:
            return ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    def _logprobs(self, request: ChatCompletionRequest, completion: CompletionOutput) -> dict[str, Any] | None:
        """OpenAI's form, with the bytes of each token's text; ``top_logprobs`` are the likeliest, by rank."""
        if not request.logprobs or completion.logprobs is None:
            return None
        content = []
        for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True):
            ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)
            top = ranked[: request.top_logprobs or 0]
            content.append(
                {
                    **self._token(request, token_id, row),
                    "top_logprobs": [self._token(request, other_id, row) for other_id, _ in top],
                }
            )
        return {"content": content, "refusal": None} if content else None

    def _token(self, request: ChatCompletionRequest, token_id: int, row: Mapping[int, Logprob]) -> dict[str, Any]:
        name = self.serving.token_name(token_id, row[token_id], request)
        return {"token": name, "logprob": finite(row[token_id].logprob), "bytes": list(name.encode("utf-8", "replace"))}


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.request_id, "object": kind, "created": job.created, "model": job.model}
