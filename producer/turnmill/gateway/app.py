"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from turnmill.gateway.counting import Counting
from turnmill.gateway.errors import ApiError, of_exception
from turnmill.gateway.gateway import Gateway
from turnmill.gateway.hangups import HungUp, unless_gone
from turnmill.gateway.placed import LARGE_BODY
from turnmill.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    Question,
    chat_question,
    completion_question,
)
from turnmill.gateway.settings import GatewaySettings
from turnmill.gateway.sse import EventStream
from turnmill.prometheus import CONTENT_TYPE

log = logging.getLogger("turnmill.gateway")

CLIENT_CLOSED = 499
"""Nobody sees it: it is counted."""
PREFIXES = ("/v1", "/runs/{run}/v1", "/runs/{run}/attempts/{attempt}/v1")
"""Outside a run; in a run, where every draw is a new one; in an attempt at it."""

Handler = Callable[[Request], Awaitable[Response]]


def make_app(settings: GatewaySettings) -> FastAPI:
    """The application of one gateway. Raises UsageError for a Redis URL that is none."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway:
            app.state.gateway = gateway
            yield

    app = FastAPI(
        title="turnmill",
        summary="OpenAI's API in front of a durable queue of turns",
        lifespan=lifespan,
        separate_input_output_schemas=False,
    )
    for prefix in PREFIXES:
        app.include_router(_openai_routes(), prefix=prefix)
    _own_routes(app)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Counting, gateway=lambda: app.state.gateway)
    return app


def _openai_routes() -> APIRouter:
    routes = APIRouter()

    @routes.post("/chat/completions", openapi_extra=_takes(ChatRequest))
    @_in_openai_shape
    async def chat_completions(request: Request) -> Response:
        """A chat completion, whole or as a stream of server-sent events."""
        return await _answer(request, chat_question)

    @routes.post("/completions", openapi_extra=_takes(CompletionRequest))
    @_in_openai_shape
    async def completions(request: Request) -> Response:
        """A completion of one prompt of text, whole or as a stream of server-sent events."""
        return await _answer(request, completion_question)

    @routes.get("/models")
    @_in_openai_shape
    async def models(request: Request) -> Response:
        """The models that live workers serve."""
        found = await _gateway(request).models(request)
        return _json({"object": "list", "data": found})

    @routes.get("/models/{model:path}")
    @_in_openai_shape
    async def model(request: Request) -> Response:
        """One model, if a live worker serves it."""
        name = request.path_params["model"]
        for found in await _gateway(request).models(request):
            if found["id"] == name:
                return _json(found)
        raise ApiError(404, f"no worker serves {name!r}", param="model", code="model_not_found")

    return routes


def _own_routes(app: FastAPI) -> None:
    @app.get("/runs/{run}/attempts/{attempt}")
    @_in_openai_shape
    async def attempt(request: Request) -> Response:
        """What an attempt was answered so far, in turns."""
        gateway = _gateway(request)
        asker = await gateway.asker(request)
        return _json((await gateway.report(asker)).model_dump())

    @app.get("/health")
    async def health() -> Response:
        """Whether this process lives."""
        return PlainTextResponse("ok\n")

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        """Whether requests can be answered here now."""
        problem = await _gateway(request).unready()
        return PlainTextResponse(f"{problem or 'ok'}\n", 503 if problem else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        text = "".join(_gateway(request).counts.text())
        return Response(text, media_type=CONTENT_TYPE)


async def _answer(request: Request, read: Callable[[bytes], Question]) -> Response:
    gateway = _gateway(request)
    asker = await gateway.asker(request)
    body = await gateway.body(request)
    question = await asyncio.to_thread(read, body) if len(body) > LARGE_BODY else read(body)

    async def start() -> Response:
        await gateway.admit(question, asker)
        if question.stream:
            chunks = gateway.answers.chunks(question, asker)
            return EventStream(await anext(chunks), chunks, gateway.counts)
        response, turns = await gateway.answers.whole(question, asker)
        return _json(
            response,
            {
                "X-Turnmill-Turn": ",".join(turn.turn.hash for turn in turns),
                "X-Turnmill-State": ",".join(turn.state for turn in turns),
            },
        )

    return await unless_gone(request.receive, start())


def _in_openai_shape(handler: Handler) -> Handler:
    """Errors become responses as OpenAI's clients expect them."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except HungUp:
            _gateway(request).counts.hang_ups += 1
            return Response(status_code=CLIENT_CLOSED)
        except Exception as error:
            refusal = of_exception(error)
            if refusal.status == 500 and not isinstance(error, ApiError):
                log.exception("%s %s", request.method, request.url.path)
            return refusal.response

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, text, code="no_such_endpoint").response


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _json(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    body = to_json(content, inf_nan_mode="null")
    return Response(body, headers=headers, media_type="application/json")


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The body is read by us, so that errors are in OpenAI's shape; its schema is told all the same."""
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}.{{model}}")
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
