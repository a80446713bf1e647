# SPDX-License-Identifier: Apache-2.0
"""The options of the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from vllm.entrypoints.openai.parsers import REASONING, TOOL_PARSERS

_HELP = {
    "host": "address to listen on; by default all of this machine's",
    "port": "port to listen on",
    "api_key": "keys, one of which a client must give; else VLLM_API_KEY, else none",
    "allowed_origins": 'JSON list of the origins whose pages may call, by default ["*"]',
    "allowed_methods": "JSON list of the methods that such pages may use",
    "allowed_headers": "JSON list of the headers that such pages may send",
    "allow_credentials": "such pages may send cookies",
    "chat_template": "Jinja text or file, instead of the tokenizer's",
    "chat_template_content_format": "content of messages for the template: auto, string or openai",
    "trust_request_chat_template": "clients may send a chat template of their own",
    "default_chat_template_kwargs": "JSON of variables for the chat template",
    "response_role": "role of the answers",
    "enable_auto_tool_choice": "the model may call tools where the client lets it choose",
    "tool_call_parser": f"how the model writes calls of tools: {', '.join(TOOL_PARSERS)}",
    "reasoning_parser": f"how the model marks its thoughts: {', '.join(REASONING)}",
    "return_tokens_as_token_ids": "tokens of log-probabilities are written token_id:N",
    "max_request_body_size": "most bytes of a request's body",
    "max_sequences_per_request": "most completions of one request, its prompts times n",
    "request_body_timeout": "seconds in which the body of a request must have come",
    "response_write_timeout": "seconds after which a client that takes nothing of its answer is cut off",
    "root_path": "path under which a proxy shows the server",
    "ssl_keyfile": "file of the TLS key",
    "ssl_certfile": "file of the TLS certificate",
    "ssl_ca_certs": "file of the authorities that sign clients' certificates",
    "ssl_cert_reqs": "whether clients need a certificate, as in Python's ssl module: 0, 1 or 2",
    "uvicorn_log_level": "critical, error, warning, info, debug or trace",
    "disable_uvicorn_access_log": "no line for each HTTP request",
    "h11_max_incomplete_event_size": "most bytes of a request's line and headers",
    "timeout_keep_alive": "seconds after which an idle connection is closed",
}


@dataclass
class FrontendArgs:
    """What is in front of the engine, with upstream's names where upstream has the option."""

    host: str | None = None
    port: int = 8000
    api_key: list[str] | None = None
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] | None = None
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    return_tokens_as_token_ids: bool = False
    max_request_body_size: int = 16 * 2**20
    max_sequences_per_request: int = 1024
    request_body_timeout: float = 60.0
    response_write_timeout: float = 60.0
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    h11_max_incomplete_event_size: int = 2**16
    timeout_keep_alive: int = 5

    def __post_init__(self) -> None:
        for name, known in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING)):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name}={getattr(self, name)!r}; give one of {', '.join(known)}")
        if not 0 < self.response_write_timeout < 1e6:
            raise ValueError(f"response_write_timeout={self.response_write_timeout:g}: give seconds, more than 0")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError(f"enable_auto_tool_choice needs tool_call_parser, one of {', '.join(TOOL_PARSERS)}")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group("server")
        hints = get_type_hints(cls)
        for f in dataclasses.fields(cls):
            hint = hints[f.name]
            kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _HELP[f.name].replace("%", "%%")}
            if f.name == "api_key":
                options |= {"nargs": "+", "metavar": "KEY"}
            elif kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif kind in (int, float, str):
                options |= {"type": kind, "metavar": kind.__name__}
            else:
                options |= {"type": json.loads, "metavar": "JSON"}
            group.add_argument("--" + f.name.replace("_", "-"), **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> FrontendArgs:
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)})
