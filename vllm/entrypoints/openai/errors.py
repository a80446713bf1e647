# SPDX-License-Identifier: Apache-2.0
"""What a client is told when something is wrong: OpenAI's JSON, whatever it was."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

logger = init_logger(__name__)

_LONGEST = 2000  # characters of a message; those of errors quote what the client sent
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class APIError(Exception):
    """An answer of HTTP ``status`` that is no success; ``param`` names the field that was wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        message = self.message if len(self.message) <= _LONGEST else self.message[:_LONGEST] + " …"
        message = message.encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif self.status == 501:  # OpenAI's client would ask again, as after other errors of a server
            headers["x-should-retry"] = "false"
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: BaseException) -> APIError:
    """What went wrong in the client's terms; what is no fault of the client's is logged and not shown."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        words = {404: "there is no such path", 405: "the path does not take this method"}
        return APIError(error.status_code, words.get(error.status_code, str(error.detail)))
    if isinstance(error, ValidationError):
        errors = error.errors(include_url=False, include_context=False)
        field = errors[0]["loc"][:1]
        # Of a field that may have several forms: what is wrong with the one that comes nearest.
        nearest = max(
            (one for one in errors if one["loc"][:1] == field),
            key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")),
        )
        given = "" if nearest["type"] in ("missing", "json_invalid") else f"; given: {repr(nearest['input'])[:200]}"
        name = str(field[0]) if field else None
        return APIError(400, f"{name + ': ' if name else ''}{nearest['msg']}{given}", name)
    if isinstance(error, EngineDeadError | EngineGenerateError):
        return APIError(503, f"the engine gives no answer: {error}")
    if isinstance(error, NotImplementedError):
        return APIError(501, str(error), _named(str(error)))
    if isinstance(error, ValueError | OverflowError):
        return APIError(400, str(error), _named(str(error)))
    logger.error("a request failed", exc_info=error)
    return APIError(500, f"internal error: {type(error).__name__}; the server's log has more")


def _named(message: str) -> str | None:
    """The parameter that a message begins with, as in ``top_p=2 must be …``."""
    found = re.match(r"(?:SamplingParams\()?([a-z][a-z_]*)(?:=|\[| has )", message)
    return found[1] if found else None
