"""What is refused, in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json
from redis.exceptions import RedisError
from starlette.responses import Response

from turnmill.errors import (
    BadTurn,
    ClientClosed,
    QueueFull,
    RecordError,
    RedisAway,
    StreamBroken,
    TurnmillError,
)
from turnmill.faults import passes
from turnmill.reply import Failure, FailureKind

RETRY_SECONDS = 5
"""What `Retry-After` says: a queue that is full, and a Redis that is away, change in seconds, not at once."""
LONGEST_MESSAGE = 2000
"""Characters."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_FAILURES: dict[FailureKind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request"),
    "engine_error": (500, "engine_error"),
    "poison": (500, "poison"),
    "unreadable": (500, "unreadable"),
    "deadline": (408, "deadline"),
    "cancelled": (400, "cancelled"),
}
_IN_VAIN = frozenset({"poison", "unreadable", "cancelled"})
"""Failures that asking again does not mend."""


class ApiError(Exception):
    """A request that is refused, or a turn that failed.

    Attributes: status, message, code, param, retry (whether asking again can help; None: the status says it).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool | None = None,
    ) -> None:
        if len(message) > LONGEST_MESSAGE:  # it quotes what was sent
            message = f"{message[:LONGEST_MESSAGE]} ..."
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry = retry
        super().__init__(message)

    @property
    def body(self) -> bytes:
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return to_json({"error": error}, inf_nan_mode="null")

    @property
    def response(self) -> Response:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_SECONDS)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry is not None:  # OpenAI's own clients obey
            headers["X-Should-Retry"] = str(self.retry).lower()
        return Response(self.body, self.status, headers, "application/json")


def refused(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request that is wrong: 400."""
    return ApiError(400, message, code=code, param=param)


def of_failure(failure: Failure) -> ApiError:
    """A turn that failed."""
    status, code = _FAILURES[failure.kind]
    return ApiError(
        status, failure.text, code=code, retry=False if failure.kind in _IN_VAIN else None
    )


def of_exception(error: Exception) -> ApiError:
    """What the library, or Redis, has raised."""
    match error:
        case ApiError():
            return error
        case BadTurn():
            return refused(None, str(error))
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case RedisAway() | ClientClosed():
            return ApiError(503, str(error), code="unavailable")
        case StreamBroken():
            return ApiError(500, str(error), code="stream_broken")
        case RecordError():
            return ApiError(500, str(error), code="unreadable", retry=False)
        case RedisError() | OSError() if passes(error):
            return ApiError(503, f"Redis is away: {error}", code="unavailable")
        case TurnmillError() | RedisError():
            return ApiError(500, str(error), code="internal_error")
    return ApiError(500, "the gateway failed; its log says why", code="internal_error")
