# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` command. Each subcommand imports what it needs only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from vllm.utils.suggestions import nearest


def _serve(argv: Sequence[str]) -> int:
    from vllm.entrypoints.cli.serve import main

    return main(argv)


def _throughput(argv: Sequence[str]) -> int:
    from vllm.entrypoints.cli.benchmark import throughput

    return throughput(argv)


def _latency(argv: Sequence[str]) -> int:
    from vllm.entrypoints.cli.benchmark import latency

    return latency(argv)


def _bench_serve(argv: Sequence[str]) -> int:
    from vllm.benchmarks.serve import main

    return main(argv)


def _chat(argv: Sequence[str]) -> int:
    from vllm.entrypoints.cli.talk import chat

    return chat(argv)


def _complete(argv: Sequence[str]) -> int:
    from vllm.entrypoints.cli.talk import complete

    return complete(argv)


def _collect_env(argv: Sequence[str]) -> int:
    from vllm.entrypoints.cli.collect_env import main

    return main(argv)


def _patches(argv: Sequence[str]) -> int:
    from patches.__main__ import main

    return main(argv)


def _doctor(argv: Sequence[str]) -> int:
    if any(word.split("=")[0] == "--fit" for word in argv):
        from vllm.entrypoints.cli.fit import main
    else:
        from vllm.v1.debug.doctor import main

    return main(argv)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "serve": (_serve, "an OpenAI server in front of all ranks, on one machine or several"),
    "chat": (_chat, "talk to a model that is served, in this terminal"),
    "complete": (_complete, "let a model that is served continue texts"),
    "bench serve": (_bench_serve, "latencies and tokens per second of a running server"),
    "bench throughput": (_throughput, "tokens per second of many requests at once"),
    "bench latency": (_latency, "time of one batch from prompt to last token"),
    "collect-env": (_collect_env, "what a bug report needs to know of this machine"),
    "doctor": (_doctor, "say from the ranks' ledgers who waits for whom; with --fit MODEL what a rank holds"),
    "patches": (_patches, "apply this project's fixes to an upstream vLLM"),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: vllm COMMAND [OPTIONS]", "", *lines, "", "vllm COMMAND --help shows its options."])


def _fail(message: str) -> NoReturn:
    print(f"{_usage()}\n\nvllm: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a mistyped command or option is named on stderr, with code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["--version"], ["-v"]):
        from vllm import __version__

        print(__version__)
        return 0
    if argv[:1] in (["--help"], ["-h"]):
        print(_usage())
        return 0
    if not argv:
        _fail("give a command")
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            return COMMANDS[name][0](argv[words:])
    name = " ".join(argv[:2] if argv[0] == "bench" else argv[:1])
    _fail(f"unknown command {name!r}{nearest(name, COMMANDS)}")


if __name__ == "__main__":
    raise SystemExit(main())
