"""The server's own OpenAPI document, and requests made up from it: never an error of ours."""

import json
import warnings
from collections.abc import Callable

import schemathesis
from fixtures.fake_engine import FakeEngine, says
from fixtures.http_server import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.server.fields import HARMLESS
from eyas.server.openapi import openapi_document
from eyas.server.protocol import ChatRequest, CompletionRequest

PATHS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
}


def test_the_document_tells_every_route_and_field() -> None:
    document = openapi_document("tiny")
    assert set(document["paths"]) == PATHS
    schemas = document["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        properties = schemas[kind.__name__]["properties"]
        assert set(kind.model_fields) | HARMLESS <= set(properties)
        assert properties["model"] == {"enum": ["tiny", None]}
        assert schemas[kind.__name__]["additionalProperties"] is False
    assert schemas["CompletionRequest"]["properties"]["best_of"] == {"enum": [1, None]}


def test_made_up_requests_are_answered_or_refused(make_server: Callable[..., Server]) -> None:
    server = make_server(FakeEngine(says([0], [1, 2])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)
        operations = [result.ok() for result in schema.get_all_operations()]
    seen = set()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(operations))
        case = data.draw(operation.as_strategy())
        seen.add(operation.path)
        body = case.body if isinstance(case.body, dict | list | str | int) else {}
        if operation.method.lower() == "get":
            response = server.get(case.formatted_path)
        else:
            response = server.post(operation.path, json.dumps(body).encode())
        assert response.status_code < 500, (operation.path, body, response.text)

    fuzz()
    assert len(seen) >= 4
