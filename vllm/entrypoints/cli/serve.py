# SPDX-License-Identifier: Apache-2.0
"""``vllm serve``: all ranks of this machine, and an OpenAI server in front of them."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from vllm import launchers
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.logger import init_logger
from vllm.utils.suggestions import nearest

logger = init_logger(__name__)

_DEMO = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 1024, "max_num_seqs": 32}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm serve",
        description="Serve a model over OpenAI's API. Without a model: a small mixture of experts, made on the spot.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML of options' names and values; the command line wins")
    group = parser.add_argument_group("processes")
    for name, kind, default, text in (
        ("nnodes", int, 1, "number of machines, each with as many ranks"),
        ("node-rank", int, 0, "which of them this is; 0 has the server"),
        ("master-addr", str, "127.0.0.1", "address of machine 0"),
        ("master-port", int, 29501, "free port on machine 0, where all meet"),
        ("max-restarts", int, 0, "how often all ranks are started again after one was lost"),
        ("shutdown-timeout", float, 30.0, "seconds that running requests get at the end"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, metavar=kind.__name__, help=f"{text} ({default})")
    group.add_argument("--headless", action="store_true", help="run ranks of machine 0's engine, and no server")
    EngineArgs.add_cli_args(parser)
    FrontendArgs.add_cli_args(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line over those of ``--config``."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.config is not None:
        given = _read_config(args.config, parser)
        if args.model_tag or args.model:
            given.pop("model", None)
        args = parser.parse_args([*_as_options(given, parser), *argv])
    return args


def _read_config(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    import yaml

    try:
        given = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config {path}: {error}")
    if not isinstance(given, dict):
        parser.error(f"--config {path} holds no names with values")
    known = [a.dest for a in parser._actions if a.option_strings and a.dest not in ("help", "config")]
    found = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name in found:
        if name not in known:
            parser.error(f"--config {path}: there is no option {name!r}{nearest(name, known)}")
    return found


def _as_options(given: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        action = parser._option_string_actions[option]
        if value is None:
            continue
        if isinstance(value, bool) and action.nargs == 0:
            words += [option] if value else [f"--no-{option[2:]}"] * (f"--no-{option[2:]}" in action.option_strings)
        elif isinstance(value, list) and action.nargs == "+":
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={json.dumps(value) if isinstance(value, dict | list) else value}")
    return words


def demo_model() -> str:
    """The folder of the example's mixture of experts, made once."""
    path = Path(__file__).parents[3] / "examples" / "offline_inference" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ValueError("the demo's model is made by the examples, which are not installed: name a model to serve")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return str(example.ensure_checkpoint("moe"))


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    if args.model_tag is None and args.model is None:
        for name, value in {**_DEMO, "served_model_name": "demo"}.items():
            if not hasattr(args, name):
                setattr(args, name, value)
        args.model = demo_model()
    return EngineArgs.from_cli_args(args)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        engine_args, frontend = _engine_args(args), FrontendArgs.from_cli_args(args)
        nodes = {name: getattr(args, name) for name in ("nnodes", "node_rank", "master_addr", "master_port")}
        if "TORCHELASTIC_RUN_ID" in os.environ:
            place = launchers.find_place()
            if place.rank:
                return _run_launched_rank(engine_args, place)
            nodes = _of_torchrun(args, place)
        if args.headless:
            return _run_headless(engine_args, nodes, args.max_restarts)
        if args.node_rank:
            raise ValueError(f"--node-rank {args.node_rank}: the server is on machine 0; add --headless on the others")
        return _serve(engine_args, frontend, {**nodes, "max_restarts": args.max_restarts}, args.shutdown_timeout)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        print(f"vllm serve: error: {error}", file=sys.stderr)
        return 2


def _of_torchrun(args: argparse.Namespace, place: launchers.Place) -> dict[str, Any]:
    if args.headless or args.nnodes > 1:
        raise ValueError(
            "--headless and --nnodes under torchrun, which starts the ranks of all machines: leave them out"
        )
    nnodes = place.world_size // (place.local_world_size or 1)
    return {"nnodes": nnodes, "master_addr": os.environ["MASTER_ADDR"], "by_torchrun": True}


def _run_launched_rank(engine_args: EngineArgs, place: launchers.Place) -> int:
    """A rank that torchrun started, of the server in the process of rank 0, with which it ends."""
    from vllm.distributed.parallel_state import check_world_size
    from vllm.v1.engine import launch, rank_process
    from vllm.v1.engine.async_llm import arguments_as_json

    check_world_size(place.world_size, engine_args.tensor_parallel_size, engine_args.data_parallel_size)
    os.environ[launch.AGENT] = str(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0's process gets them too, and lets requests end
        signal.signal(number, signal.SIG_IGN)
    rank_process.main([json.dumps(arguments_as_json(engine_args))])
    return 0


def _run_headless(engine_args: EngineArgs, nodes: dict[str, Any], max_restarts: int) -> int:
    from vllm.v1.engine.async_llm import make_launch
    from vllm.v1.engine.launch import RankFailed, run_agent

    if engine_args.distributed_executor_backend == "ray":
        raise ValueError("--headless with Ray, which starts the ranks of all machines: there, run `ray start` alone")
    launch = make_launch(engine_args, engine_args.create_engine_config(), max_restarts=max_restarts, **nodes)
    try:
        return run_agent(launch)
    except RankFailed as error:
        print(f"vllm serve: {error}: the ranks of this machine end", file=sys.stderr)
        return 1


@contextmanager
def _ending_at(*signals: signal.Signals) -> Any:
    """An engine that starts has nothing to drain: the signals end it with what it has started."""

    def end(number: int, _frame: Any) -> NoReturn:
        raise SystemExit(0 if number == signal.SIGTERM else 128 + number)

    before = {number: signal.signal(number, end) for number in signals}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _listen(host: str | None, port: int) -> socket.socket:
    """Bound, so that a port in use is known before the engine starts; connections are refused until it has."""
    family = socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host or "0.0.0.0", port))
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host or '0.0.0.0'} --port {port}: {error.strerror}; give another") from None
    return listener


def _serve(engine_args: EngineArgs, frontend: FrontendArgs, options: dict[str, Any], shutdown_timeout: float) -> int:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    began = time.monotonic()
    with _listen(frontend.host, frontend.port) as listener, _ending_at(signal.SIGTERM, signal.SIGINT):
        try:
            llm = AsyncLLM.from_engine_args(engine_args, **options)
        except EngineDeadError as error:
            print(f"vllm serve: error: {error}", file=sys.stderr)
            return 1
        try:
            host, port = listener.getsockname()[:2]
            logger.info("ready after %.1f s: http://%s:%d", time.monotonic() - began, host, port)
            asyncio.run(_answer(llm, frontend, listener, shutdown_timeout))
        finally:
            llm.shutdown(0 if sys.exc_info()[0] else 1)
    if llm.ranks.dead is not None:
        print(f"vllm serve: {llm.ranks.dead}", file=sys.stderr)
        return 1
    return 0


async def _answer(llm: Any, frontend: FrontendArgs, listener: socket.socket, shutdown_timeout: float) -> None:
    """Until a signal, or the engine's end. The first signal lets requests end, the next one does not."""
    import uvicorn

    from vllm.entrypoints.openai.api_server import build_app, uvicorn_config

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Any:
            yield

    config = uvicorn_config(build_app(llm, frontend), frontend)
    config.timeout_graceful_shutdown = max(round(shutdown_timeout), 1)
    server, loop = Server(config), asyncio.get_running_loop()

    def stop() -> None:
        for connection in list(server.server_state.connections) if server.should_exit else ():
            connection.transport.abort()  # its request ends as if its client had left
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    async def follow() -> None:
        while not llm.ranks.has_ended:
            await asyncio.sleep(0.25)
        server.should_exit = True

    following = asyncio.create_task(follow())
    await server.serve(sockets=[listener])
    following.cancel()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
