"""Routes of the public port (FastAPI). Every failure is sent as OpenAI's error object.

Each route reads a bounded body, decodes it with `protocol` and calls the service. No decisions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from medha.config import RouterConfig
from medha.errors import MedhaError, RequestError
from medha.messages import from_bytes
from medha_router import api_errors, openapi, protocol
from medha_router.api_errors import REQUEST_ID
from medha_router.auth import ApiKeys, Client, ClientMiddleware, read_claim
from medha_router.bodies import BodyReader, JsonResponse
from medha_router.dialects import messages_answer
from medha_router.dialects.answer import AnswerResponse
from medha_router.dialects.conversation import Names, renamed
from medha_router.dialects.http_response import OpenAiResponse, ServedGeneration
from medha_router.dialects.messages_answer import MessageAnswer
from medha_router.dialects.messages_body import CountTokensBody, MessagesBody
from medha_router.dialects.openai_answer import ResponseBuilder, model_shape, models_page
from medha_router.dialects.responses_answer import ResponseAnswer
from medha_router.dialects.responses_body import INPUT_NAMES, ResponsesBody, ResponsesParams
from medha_router.generation import ClientRequest
from medha_router.http_protocol import RESPONSE_HEADERS
from medha_router.protocol import GenerationParams, TokenizeParams
from medha_router.service import Service

VERSION = importlib.metadata.version("medha")
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; never received
CLIENT_REQUEST_ID = "x-request-id"
MAX_CLIENT_ID_CHARS = 128
INLINE_TOKENS = 8192
ELSEWHERE = {"/metrics": "the ops port has it", "/load": "the ops port has /debug/queue"}
"""Pages of vLLM's server that are not on the public port here."""

Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    service: Service,
    config: RouterConfig,
    keys: ApiKeys | None,
    limited: Callable[[ASGIApp], ASGIApp],
) -> ASGIApp:
    """Make the application of the public port; without `keys` it needs no API key.

    `limited` wraps what costs memory; its refusals have the form and the ids of other errors.
    """
    app = FastAPI(
        title="Medha",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,  # the URL of a redirect is the client's Host header, without TLS
        responses=openapi.errors(),
    )
    bodies = BodyReader(config.max_body_bytes, service.tokens)
    direct = _serve_generations(app, service, bodies, config)
    _serve_models(app, service)
    _serve_tokens(app, service, bodies)
    _serve_server(app, service)
    _handle_errors(app, frozenset(route.path for route in app.routes if isinstance(route, Route)))
    openapi.complete(app)
    served: ASGIApp = DirectRoutes(app, direct)
    served = ClientMiddleware(served, keys, config.share_cache)
    served = messages_answer.MessagesErrors(limited(served))
    if config.allowed_origins:
        every = ("*",)  # requests carry no cookies
        served = CORSMiddleware(served, config.allowed_origins, every, every, expose_headers=every)
    return RequestIds(served, new_id=service.new_id)


def _serve_generations(
    app: FastAPI, service: Service, bodies: BodyReader, config: RouterConfig
) -> dict[str, Handler]:
    """Declare the routes; returns their handlers by path."""

    def serving(request: Request, params: GenerationParams, names: Names = ()) -> ServedGeneration:
        state = request.scope["state"]
        client: Client = state["client"]
        slo = read_claim(_headers(request), config.class_headers, client)
        request_id: str = state["request_id"]
        if state["client_id"]:
            params = msgspec.structs.replace(params, client_id=state["client_id"])
        elif params.client_id:
            state[RESPONSE_HEADERS][CLIENT_REQUEST_ID.encode()] = params.client_id.encode()

        async def begin() -> ClientRequest:
            try:
                with bodies.held(len(params.raw), client.owner):
                    return await service.begin(request_id, params, slo, client)
            except RequestError as error:
                raise renamed(error, names) from None

        def held(size_bytes: int) -> contextlib.AbstractContextManager[None]:
            return bodies.sending(size_bytes, client.owner)

        return ServedGeneration(request_id, params, begin, service.cancel, held, config.keepalive_s)

    async def generate(request: Request, chat: bool) -> Response:
        kind = "chat" if chat else "completion"
        params = await bodies.params(request, kind, GenerationParams)

        def make_builder(client_request: ClientRequest) -> ResponseBuilder:
            return ResponseBuilder(
                chat=chat,
                id=client_request.id,
                model=client_request.params.model,
                created=client_request.created,
                make_parser=client_request.parser if chat else None,
                names_ids=params.names_ids,
                shown_id=params.client_id,
            )

        return OpenAiResponse(serving(request, params), make_builder)

    @app.post(
        "/v1/chat/completions", openapi_extra=openapi.body_of(protocol.ChatBody, streams=True)
    )
    async def chat_completions(request: Request) -> Response:
        return await generate(request, True)

    @app.post(
        "/v1/completions", openapi_extra=openapi.body_of(protocol.CompletionBody, streams=True)
    )
    async def completions(request: Request) -> Response:
        return await generate(request, False)

    @app.post("/v1/responses", openapi_extra=openapi.body_of(ResponsesBody, streams=True))
    async def responses(request: Request) -> Response:
        params = await bodies.params(request, "responses", ResponsesParams)

        def make_answer(client_request: ClientRequest) -> ResponseAnswer:
            return ResponseAnswer(client_request, params)

        return AnswerResponse(serving(request, params, INPUT_NAMES), make_answer)

    @app.post(messages_answer.PATH, openapi_extra=openapi.body_of(MessagesBody, streams=True))
    async def messages(request: Request) -> Response:
        params = await bodies.params(request, "messages", GenerationParams)
        return AnswerResponse(serving(request, params), MessageAnswer)

    return {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/responses": responses,
        messages_answer.PATH: messages,
    }


def _serve_models(app: FastAPI, service: Service) -> None:
    def shape(name: str) -> dict[str, Any]:
        model, adapter = service.model(name or "/")  # an empty name is no model's here
        parent = model.name if adapter else None
        return model_shape(name, service.started, model.max_context_tokens, parent)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(models_page([shape(name) for name in service.models.names]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(shape(name))


def _serve_tokens(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    @app.post("/tokenize", openapi_extra=openapi.body_of(protocol.TokenizeBody))
    async def tokenize(request: Request) -> Response:
        params = await bodies.params(request, "tokenize", TokenizeParams)
        client: Client = request.state.client
        with bodies.held(len(params.raw), client.owner):
            prompt, model = await service.encode(params, client)
        tokens: bytes | memoryview
        if prompt.length <= INLINE_TOKENS:
            tokens = msgspec.json.encode(from_bytes(prompt.tokens).tolist())
        else:
            tokens = await service.tokens.format_tokens(prompt.tokens, client.owner)
        counts = {"count": prompt.length, "max_model_len": model.max_context_tokens}
        head = msgspec.json.encode(counts)[:-1] + b',"token_strs":null,"tokens":'
        return bodies.answer(request, head, tokens, b"}")

    @app.post(
        f"{messages_answer.PATH}/count_tokens", openapi_extra=openapi.body_of(CountTokensBody)
    )
    async def count_tokens(request: Request) -> Response:
        params = await bodies.params(request, "count_tokens", TokenizeParams)
        client: Client = request.state.client
        with bodies.held(len(params.raw), client.owner):
            prompt, _ = await service.encode(params, client)
        return _json({"input_tokens": prompt.length})

    @app.post("/detokenize", openapi_extra=openapi.body_of(protocol.DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        params = await bodies.params(request, "detokenize", protocol.DetokenizeParams)
        client: Client = request.state.client
        with bodies.held(len(params.raw), client.owner):
            answer = await service.detokenize(params.model, params.raw, client)
        return bodies.answer(request, answer)


def _serve_server(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=Response)
    @app.get("/ping", response_class=Response)
    async def health() -> Response:
        """Return 200 while the server takes requests."""
        return Response(status_code=200 if service.ready else 503)

    @app.get("/version")
    async def version() -> Response:
        """Return the version of the server."""
        return _json({"version": VERSION})


def _handle_errors(app: FastAPI, paths: Set[str]) -> None:
    """Declare how failures are answered; `paths`: those of the routes."""

    @app.exception_handler(MedhaError)
    async def medha_error(request: Request, error: Exception) -> Response:
        return api_errors.response(api_errors.of_exception(error))

    @app.exception_handler(ClientDisconnect)
    async def client_disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(getattr(error, "headers", None) or {})
        path, method = request.scope["path"][:80], request.method[:20]
        if status == 404:
            message = f"this server has no {path}"
            if hint := _hint(path, paths):
                message += f": {hint}"
            api_error = api_errors.of_status(404, message, code="not_found")
        elif status == 405:
            api_error = api_errors.of_status(
                405,
                f"{method} is not allowed on {path}; use {headers.get('Allow', 'another')}",
                code="method_not_allowed",
                headers=headers,
            )
        else:
            api_error = api_errors.of_status(
                status, "the request cannot be served", headers=headers
            )
        return api_errors.response(api_error)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logging.getLogger("medha.router").error("a route failed", exc_info=error)
        return api_errors.response(api_errors.of_exception(error))


def _hint(path: str, paths: Set[str]) -> str:
    """Return where a client of a wrong base URL finds what it asks for, or nothing."""
    stem = "/" + path.strip("/").removeprefix("v1/")
    near = next((known for known in (stem, f"/v1{stem}") if known in paths), "")
    return ELSEWHERE.get(stem, near and f"use {near}")


def _json(value: object) -> Response:
    return JsonResponse((msgspec.json.encode(value),))


class RequestIds:
    """ASGI middleware that names each request, and puts its names on every response.

    `x-medha-request-id` is drawn here. `x-request-id` repeats the client's, or that id if the
    client's is absent, too long or not printable ASCII.
    """

    def __init__(self, app: ASGIApp, new_id: Callable[[], str]) -> None:
        self._app, self._new_id = app, new_id

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"], state["client_id"] = self._new_id(), _client_id(scope)
        request_id = state["request_id"].encode()
        state[RESPONSE_HEADERS] = {
            REQUEST_ID.encode(): request_id,
            CLIENT_REQUEST_ID.encode(): state["client_id"].encode() or request_id,
        }
        return self._app(scope, receive, send)


class DirectRoutes:
    """ASGI application that serves POST to some paths itself, and all else by FastAPI.

    FastAPI declares these routes too; its layers take longer than the rest of a short request.
    """

    def __init__(self, app: FastAPI, handlers: Mapping[str, Handler]) -> None:
        self._app, self._handlers = app, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope.get("method") == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive))
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, MedhaError):
                logging.getLogger("medha.router").error("a route failed", exc_info=error)
            response = api_errors.response(api_errors.of_exception(error))
        await response(scope, receive, send)


def _headers(request: Request) -> dict[str, str]:
    """Return the first header of each name."""
    pairs = reversed(request.scope["headers"])
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


def _client_id(scope: Scope) -> str:
    given = next(
        (value for name, value in scope["headers"] if name == CLIENT_REQUEST_ID.encode()), b""
    )
    text: str = given.decode("latin-1")
    usable = len(text) <= MAX_CLIENT_ID_CHARS and text.isascii() and text.isprintable()
    return text if usable else ""
