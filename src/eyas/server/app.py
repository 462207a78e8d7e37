"""The routes: completions, models, the tokenizer, and what operators ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from eyas.engine.chat_images import EncodedPrompt
from eyas.server.access import AccessMiddleware
from eyas.server.chat_message import ChatMessage, image_places
from eyas.server.errors import (
    ApiError,
    as_api_error,
    error_response,
    install_error_handlers,
    shortened,
)
from eyas.server.formats import ChatFormat, CompletionFormat, Envelope, Format, ModelCard
from eyas.server.metrics import CONTENT_TYPE, Meter, Metrics
from eyas.server.openapi import openapi_document
from eyas.server.protocol import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse_request,
)
from eyas.server.service import Generation, Service
from eyas.server.state import Phase, ServerState
from eyas.server.stream import EventStream, events
from eyas.server.transport import ClientGoneError, read_body, unless_client_leaves

MAX_BODY_BYTES = 16 << 20
CLIENT_GONE = 499  # nobody reads it
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

Body = TypeVar("Body", ChatRequest, CompletionRequest)
Start = Callable[[Service, Body], Awaitable[Generation]]


def create_app(
    state: ServerState,
    model: ModelCard,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    api_keys: tuple[str, ...] = (),
) -> FastAPI:
    """The application over a server's state; it answers 503 until the state is ready.

    model: its name is the one that requests must give. max_body_bytes: longer bodies get a 413.
    api_keys: clients must bring one of them; none: no key is asked for.
    """
    # No generated documentation: its page would fetch scripts from elsewhere.
    app = FastAPI(title="Eyas", openapi_url=None)
    install_error_handlers(app)
    app.add_exception_handler(ClientGoneError, lambda *_: Response(status_code=CLIENT_GONE))
    app.add_middleware(AccessMiddleware, api_keys=api_keys)
    routes = _Routes(state, model, max_body_bytes)
    for method, path, route in (
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/openapi.json", routes.openapi),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.one_model),
        ("POST", "/v1/completions", routes.complete),
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
    ):
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, route, methods=methods, response_model=None)
    return app


async def _encode_chat(
    service: Service, messages: Sequence[ChatMessage], body: ChatRequest | TokenizeRequest
) -> EncodedPrompt:
    return await service.prompts.encode_chat(
        [message.for_template() for message in messages],
        body.chat_template_kwargs,
        image_places(messages),
        must_fit=isinstance(body, ChatRequest),
    )


class _Routes:
    def __init__(self, state: ServerState, model: ModelCard, max_body_bytes: int) -> None:
        self._state, self._model, self._max_body_bytes = state, model, max_body_bytes
        self._metrics = Metrics(state)

    async def health(self) -> Response:
        health = self._state.health()
        return JSONResponse(health, 200 if health["status"] is Phase.READY else 503)

    async def ready(self) -> Response:
        ready = self._state.ready()
        return JSONResponse(ready, 200 if ready["status"] is Phase.READY else 503)

    async def metrics(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def openapi(self) -> Response:
        return JSONResponse(openapi_document(self._model.name))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(self._state.service())]})

    async def one_model(self, name: str) -> Response:
        service = self._state.service()
        self._check_model(name)
        return JSONResponse(self._card(service))

    async def tokenize(self, request: Request) -> Response:
        service = self._state.service()
        body = await self._parse(request, TokenizeRequest)
        if body.messages is not None:
            tokens = (await _encode_chat(service, body.messages, body)).token_ids
        else:
            special = body.add_special_tokens
            tokens = await service.prompts.tokenize(body.prompt or "", add_special_tokens=special)
        told = {"count": len(tokens), "max_model_len": service.engine.info.max_model_len}
        return JSONResponse(told | {"tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        service = self._state.service()
        body = await self._parse(request, DetokenizeRequest)
        [text] = await service.prompts.decode([body.tokens])
        return JSONResponse({"prompt": text})

    async def chat(self, request: Request) -> Response:
        async def start(service: Service, body: ChatRequest) -> Generation:
            prompt = await _encode_chat(service, body.messages, body)
            return await service.generate(
                [prompt.token_ids],
                body.sampling_params(),
                num_choices=body.n,
                images=[prompt.images],
            )

        return await self._answer(request, ChatRequest, start, ChatFormat())

    async def complete(self, request: Request) -> Response:
        async def start(service: Service, body: CompletionRequest) -> Generation:
            return await service.generate(
                await service.prompts.encode(body.prompt),
                body.sampling_params(),
                num_choices=body.n,
                default_max_tokens=COMPLETION_MAX_TOKENS,
                echo=await service.prompts.decode(body.prompt) if body.echo else None,
            )

        return await self._answer(request, CompletionRequest, start, CompletionFormat())

    async def _parse(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        body = parse_request(kind, await read_body(request, self._max_body_bytes))
        self._check_model(body.model)
        return body

    async def _answer(
        self, request: Request, kind: type[Body], start: Start[Body], form: Format
    ) -> Response:
        """Start a generation and answer with its stream, or with the whole of it.

        What the engine refuses is an HTTP error in both cases: a stream begins after the engine
        has accepted the request.
        """
        meter = self._metrics.meter(request.url.path)
        try:
            service = self._state.service()
            body = await self._parse(request, kind)

            async def run() -> Response:
                generation = await start(service, body)
                meter.accept(generation.num_prompt_tokens)
                generation.on_piece = meter.piece
                return await self._response(generation, body, form, meter)

            return await unless_client_leaves(request.receive, run())
        except ClientGoneError:
            meter.end("aborted")
            raise
        except Exception as error:
            api_error = as_api_error(error)
            meter.end("refused" if api_error.status < 500 else "error")
            return error_response(api_error)

    async def _response(
        self, generation: Generation, body: GenerationRequest, form: Format, meter: Meter
    ) -> Response:
        envelope = Envelope(form, self._model)
        if body.stream:
            content = events(generation, envelope, meter, told=body.usage_in_stream)
            return EventStream(generation, content, meter)
        try:
            response = JSONResponse(envelope.whole(await generation.collect(), generation))
            meter.end("ok", num_cached_tokens=generation.num_cached_tokens)
            return response
        finally:
            generation.close()

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise ApiError(
                404,
                f"the model {shortened(name)!r} is not served here; this server has "
                f"{self._model.name!r}",
                param="model",
                code="model_not_found",
            )

    def _card(self, service: Service) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "eyas",
            "max_model_len": service.engine.info.max_model_len,
        }
