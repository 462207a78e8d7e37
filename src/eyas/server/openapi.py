"""The OpenAPI document of the server, made from the classes that parse its requests."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from eyas import __version__
from eyas.server.fields import HARMLESS
from eyas.server.protocol import (
    NEUTRAL_FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REF = "#/components/schemas/"
_ERRORS = {
    "400": "a mistake in the request",
    "401": "no API key, or a wrong one",
    "404": "no such model",
    "408": "the body took too long",
    "413": "the body is too long",
    "503": "the server is not ready, or no longer",
}
_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "an answer to a conversation"),
    "/v1/completions": (CompletionRequest, "the continuation of prompts"),
    "/tokenize": (TokenizeRequest, "the tokens of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, "the text of tokens"),
}
_READS = {
    "/v1/models": "the served model",
    "/health": "the phase, and how full the engine is",
    "/ready": "the phase with its progress; 200 when a completion works",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@functools.cache
def openapi_document(model_name: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1. model_name: the served one."""
    kinds = [kind for kind, _ in _BODIES.values()]
    _, made = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=_REF + "{model}"
    )
    schemas: dict[str, Any] = dict(made["$defs"])
    for kind in kinds:
        schemas[kind.__name__]["properties"]["model"] = {"enum": [model_name, None]}
    for kind, neutral in NEUTRAL_FIELDS.items():
        schemas[kind.__name__]["properties"] |= _neutral_properties(neutral)
    schemas["Error"] = _ERROR_SCHEMA
    paths: dict[str, Any] = {}
    for path, (kind, text) in _BODIES.items():
        body = {"required": True, "content": _json(kind.__name__)}
        paths[path] = {"post": {"requestBody": body, "responses": _responses(kind, text)}}
    for path, text in _READS.items():
        responses = {"200": _object(text), "401": _error("401"), "503": _object(_ERRORS["503"])}
        paths[path] = {"get": {"responses": responses}}
    text_plain = {"text/plain": {"schema": {"type": "string"}}}
    metrics = {"200": {"description": "metrics for Prometheus", "content": text_plain}}
    paths["/metrics"] = {"get": {"responses": metrics}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Eyas", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _neutral_properties(neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Fields that do nothing, whatever they hold, and those that may only ask for nothing."""
    properties: dict[str, Any] = {name: {} for name in sorted(HARMLESS)}
    for name, values in neutral.items():
        properties[name] = {"enum": [*values, None]}
    return properties


def _responses(kind: type[BaseModel], text: str) -> dict[str, Any]:
    answer = _object(text)
    if "stream" in kind.model_fields:
        answer["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
    return {"200": answer} | {status: _error(status) for status in _ERRORS}


def _object(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }


def _error(status: str) -> dict[str, Any]:
    return {"description": _ERRORS[status], "content": _json("Error")}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF + name}}}
