# SPDX-License-Identifier: Apache-2.0
"""``vllm chat`` and ``vllm complete``: talk to a running server, of this project or another, from a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from vllm import envs
from vllm.utils.argparse_utils import Parser
from vllm.utils.http_client import HTTPError, request

# A terminal obeys these, so a model's answer must not hold them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _parser(name: str, description: str) -> Parser:
    parser = Parser(f"vllm {name}", description + " Ctrl-C stops an answer, Ctrl-D leaves.")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="where the server is (default: %(default)s)")
    parser.add_argument("--model", "--model-name", dest="model", help="by default the first that the server names")
    parser.add_argument("--api-key", help="by default OPENAI_API_KEY or VLLM_API_KEY, where set")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token each time")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this alone, print the answer and leave")
    return parser


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run`` that hears every Ctrl-C: one that comes between the loop's last look and its wait would show at
    the next event alone, which may never come. It cancels the coroutine and raises ``KeyboardInterrupt``."""

    async def heard() -> Any:
        task = asyncio.current_task()
        assert task is not None
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a process in the background is not to hear it
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await coroutine

    try:
        return asyncio.run(heard())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.url, self.is_quick = args.url.rstrip("/"), args.quick is not None
        key = args.api_key or os.environ.get("OPENAI_API_KEY") or envs.VLLM_API_KEY
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.options: dict[str, Any] = {"model": args.model or _run(self._first_model()), "stream": True}
        for name in ("max_tokens", "temperature"):
            if getattr(args, name) is not None:
                self.options[name] = getattr(args, name)

    async def _first_model(self) -> str:
        async with request(f"{self.url}/models", headers=self.headers) as response:
            return (await response.json())["data"][0]["id"]

    def ask(self, path: str, text_of: Callable[[dict[str, Any]], tuple[str, str]], **fields: Any) -> str:
        """Prints the answer as it comes; ``text_of`` gives a choice's thought and text. Returns the text, what there is
        of it where Ctrl-C stopped it."""
        shows, said = sys.stdout.isatty(), list[str]()

        def write(text: str, style: str = "") -> None:
            text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if shows else text
            sys.stdout.write(f"{style}{text}\x1b[0m" if style else text)
            sys.stdout.flush()

        async def run() -> None:
            async with request(f"{self.url}/{path}", {**self.options, **fields}, self.headers) as response:
                async for event in response.events():
                    for choice in event.get("choices", ()):
                        thought, text = text_of(choice)
                        if thought and shows:
                            write(thought, "\x1b[2m")
                        if text:
                            said.append(text)
                            write(text)

        try:
            _run(run())
        except KeyboardInterrupt:
            if self.is_quick:
                raise
        finally:
            write("\n")
        return "".join(said)


def _loop(parser: Parser, args: argparse.Namespace, make: Callable[[_Server], Callable[[str], None]]) -> int:
    try:
        server = _Server(args)
    except KeyboardInterrupt:
        return 130
    except (OSError, HTTPError, ValueError, LookupError) as error:
        return _explain(parser, args.url, error)
    answer = make(server)
    if args.quick is not None:
        try:
            answer(args.quick)
        except KeyboardInterrupt:
            return 130
        except (OSError, HTTPError, ValueError) as error:
            return _explain(parser, args.url, error)
        return 0
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it
    print(f"{server.options['model']} at {server.url}", file=sys.stderr)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
            if text.strip():
                answer(text)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except (OSError, HTTPError, ValueError) as error:
            _explain(parser, args.url, error)


def _explain(parser: Parser, url: str, error: Exception) -> int:
    if isinstance(error, OSError):
        error = ConnectionError(f"there is no answer from {url} ({error}): start `vllm serve`, or give --url")
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 1


def chat(argv: Sequence[str] | None = None) -> int:
    """A conversation; each answer knows what was said before."""
    parser = _parser("chat", "Chat with a model that is served.")
    parser.add_argument("--system-prompt", help="said to the model before all else")
    args = parser.parse_args(argv)
    said = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []

    def text_of(choice: dict[str, Any]) -> tuple[str, str]:
        delta = choice.get("delta") or {}
        return delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or ""

    def make(server: _Server) -> Callable[[str], None]:
        def answer(text: str) -> None:
            said.append({"role": "user", "content": text})
            try:
                told = server.ask("chat/completions", text_of, messages=said)
            except BaseException:
                said.pop()
                raise
            said.append({"role": "assistant", "content": told})

        return answer

    return _loop(parser, args, make)


def complete(argv: Sequence[str] | None = None) -> int:
    """Each line is continued, on its own."""
    parser = _parser("complete", "Let a model that is served continue a text.")
    args = parser.parse_args(argv)

    def make(server: _Server) -> Callable[[str], None]:
        return lambda text: (server.ask("completions", lambda c: ("", c.get("text") or ""), prompt=text), None)[1]

    return _loop(parser, args, make)
