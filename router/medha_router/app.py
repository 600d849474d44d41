"""The public port's routes: FastAPI, thin; every failure leaves as OpenAI's error object.

Reads a body once and within bounds, lets `openai` and `slo` say what is asked, and hands it to the
service. Nothing is decided here.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from medha.errors import MedhaError, RequestError
from medha.messages import from_bytes
from medha_router import faults, openai
from medha_router.answers import AnswerResponse
from medha_router.bodies import Bodies
from medha_router.detokenizer import text_of
from medha_router.keys import ApiKeys, Gate
from medha_router.replies import Shapes, model_shape
from medha_router.runs import Answer
from medha_router.service import Service
from medha_router.slo import read_slo

GONE = 499  # the client closed its request; nobody reads this


def make_app(
    service: Service, *, max_body_bytes: int, keepalive_s: float, keys: ApiKeys | None = None
) -> FastAPI:
    """The application of the public port; without `keys` it is open to everybody."""
    app = FastAPI(title="Medha", docs_url=None, redoc_url=None, openapi_url=None)
    bodies = Bodies(max_body_bytes)
    _serve_generations(app, service, bodies, keepalive_s)
    _serve_models(app, service)
    _serve_tokens(app, service, bodies)
    _serve_faults(app)
    if keys is not None:
        app.add_middleware(Gate, keys=keys)
    return app


def _serve_generations(app: FastAPI, service: Service, bodies: Bodies, keepalive_s: float) -> None:
    async def generate(request: Request, chat: bool) -> Response:
        body = await bodies.read(request)
        ask = openai.read_chat(body) if chat else openai.read_completion(body)
        slo = read_slo(request.headers)
        name = service.new_id()
        tenant = getattr(request.state, "tenant", "")

        def shapes(answer: Answer) -> Shapes:
            return Shapes(
                chat=chat, id=name, model=ask.model, created=answer.created,
            )  # fmt: skip

        return AnswerResponse(
            name,
            ask,
            lambda: service.begin(name, ask, slo, tenant),
            service.cancel,
            shapes,
            keepalive_s,
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, False)


def _serve_models(app: FastAPI, service: Service) -> None:
    def shape(name: str) -> dict[str, Any]:
        model = service.model(name)
        return model_shape(name, service.started, model.max_context_tokens)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [shape(name) for name in sorted(service.models)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(shape(name))


def _serve_tokens(app: FastAPI, service: Service, bodies: Bodies) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = openai.read_body(await bodies.read(request), openai.TokenizeBody)
        chat = bool(bytes(body.messages))
        if chat == bool(bytes(body.prompt)):
            raise RequestError(
                "give either prompt or messages", code="invalid_value", param="prompt"
            )
        prompt, model = await service.encode(
            body.model,
            chat=chat,
            raw=bytes(body.messages if chat else body.prompt),
            special=body.add_special_tokens is not False,
            opening=body.add_generation_prompt is not False,
        )
        return _json({
            "count": prompt.length,
            "max_model_len": model.max_context_tokens,
            "tokens": from_bytes(prompt.tokens).tolist(),
        })  # fmt: skip

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = openai.read_body(await bodies.read(request), openai.DetokenizeBody)
        vocabulary = await service.vocabulary(body.model)
        wrong = [token for token in body.tokens if not 0 <= token < vocabulary.size]
        if wrong:
            raise RequestError(
                f"tokens holds {wrong[0]}: this model's vocabulary has {vocabulary.size} tokens",
                code="invalid_value", param="tokens",
            )  # fmt: skip
        return _json({"prompt": text_of(vocabulary, body.tokens)})


def _serve_faults(app: FastAPI) -> None:
    @app.exception_handler(MedhaError)
    async def known(request: Request, error: Exception) -> Response:
        return faults.response(faults.fault_of(error))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(getattr(error, "headers", None) or {})
        path, method = request.url.path[:80], request.method[:20]
        if status == 404:
            fault = faults.plain(404, f"there is no {path} here", code="not_found")
        elif status == 405:
            fault = faults.plain(
                405, f"{method} is not allowed on {path}; use {headers.get('Allow', 'another')}",
                code="method_not_allowed", headers=headers,
            )  # fmt: skip
        else:
            fault = faults.plain(status, "the request cannot be served", headers=headers)
        return faults.response(fault)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        logging.getLogger("medha.router").error("a route failed", exc_info=error)
        return faults.response(faults.fault_of(error))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
