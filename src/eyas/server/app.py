"""The routes: /v1/chat/completions, /v1/completions, /v1/models, /health."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from eyas.server.errors import ApiError, error_response, install_error_handlers
from eyas.server.formats import ChatFormat, CompletionFormat, Envelope, Format, ModelCard
from eyas.server.protocol import ChatRequest, CompletionRequest, parse_request
from eyas.server.service import Generation, Service
from eyas.server.state import Phase, ServerState
from eyas.server.stream import EventStream, events
from eyas.server.transport import ClientGoneError, read_body, unless_client_leaves
from eyas.types import SamplingParams

MAX_BODY_BYTES = 16 << 20
CLIENT_GONE = 499  # nobody reads it
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


def create_app(
    state: ServerState, model: ModelCard, *, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application over a server's state; it answers 503 until the state is ready.

    model: its name is the one that requests must give. max_body_bytes: longer bodies get a 413.
    """
    # No generated documentation: its page would fetch scripts from elsewhere.
    app = FastAPI(title="Eyas", openapi_url=None)
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, lambda *_: Response(status_code=CLIENT_GONE))
    routes = _Routes(state, model, max_body_bytes)
    app.add_api_route("/health", routes.health, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route(
        "/v1/models/{name:path}", routes.one_model, methods=["GET"], response_model=None
    )
    app.add_api_route("/v1/completions", routes.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    return app


class _Routes:
    def __init__(self, state: ServerState, model: ModelCard, max_body_bytes: int) -> None:
        self._state, self._model, self._max_body_bytes = state, model, max_body_bytes

    async def health(self) -> Response:
        health = self._state.health()
        return JSONResponse(health, 200 if health["status"] == Phase.READY else 503)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(self._state.service())]})

    async def one_model(self, name: str) -> Response:
        service = self._state.service()
        self._check_model(name)
        return JSONResponse(self._card(service))

    async def chat(self, request: Request) -> Response:
        service = self._state.service()
        body = await self._parse(request, ChatRequest)

        async def start() -> Generation:
            messages = [message.for_template() for message in body.messages]
            prompt = await service.render_chat(messages, body.chat_template_kwargs)
            return await service.generate([prompt], _params(body), num_choices=body.n)

        return await self._answer(request, body, start, ChatFormat())

    async def complete(self, request: Request) -> Response:
        service = self._state.service()
        body = await self._parse(request, CompletionRequest)

        async def start() -> Generation:
            return await service.generate(
                await service.encode(body.prompt),
                _params(body),
                num_choices=body.n,
                default_max_tokens=COMPLETION_MAX_TOKENS,
            )

        return await self._answer(request, body, start, CompletionFormat())

    async def _parse(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        body = parse_request(kind, await read_body(request, self._max_body_bytes))
        self._check_model(body.model)
        return body

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        start: Callable[[], Coroutine[Any, Any, Generation]],
        answer: Format,
    ) -> Response:
        """Start a generation and answer with its stream, or with the whole of it.

        What the engine refuses is an HTTP error in both cases: a stream begins after the engine
        has accepted the request.
        """
        envelope = Envelope(answer, self._model)

        async def whole() -> Response:
            generation = await start()
            try:
                return JSONResponse(envelope.whole(await generation.collect(), generation))
            finally:
                generation.close()

        try:
            if not body.stream:
                return await unless_client_leaves(request.receive, whole())
            generation = await unless_client_leaves(request.receive, start())
        except ClientGoneError:
            raise
        except Exception as error:
            return error_response(error)
        content = events(generation, envelope, include_usage=body.include_usage)
        return EventStream(generation, content)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server has {self._model.name!r}",
                param="model",
                code="model_not_found",
            )

    def _card(self, service: Service) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "eyas",
            "max_model_len": service.engine.max_model_len,
        }


def _params(body: ChatRequest | CompletionRequest) -> SamplingParams:
    max_tokens = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )
