"""The phases: nothing but ready answers requests, and /health says how far it is."""

from collections.abc import Callable

import pytest
from fixtures.fake_engine import FakeEngine, says
from fixtures.http_server import Server

from eyas.server.state import Phase, ServerState

MakeServer = Callable[..., Server]


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server(FakeEngine(says([0])))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
def test_models_are_not_listed_before_they_answer(server: Server, path: str) -> None:
    server.state.phase = Phase.LOADING
    assert server.get(path).status_code == 503


@pytest.mark.parametrize(
    ("change", "health"),
    [
        (lambda state: state.warm_up(), {"status": "warming"}),
        (lambda state: None, {"status": "checking"}),
        (
            lambda state: state.report_progress("converting x", 1, 3),
            {"status": "checking", "detail": "converting x: 33 %"},
        ),
        (
            lambda state: state.report_progress("loading target", 1, 2),
            {"status": "loading", "detail": "loading target: 50 %"},
        ),
        (lambda state: state.stop(), {"status": "stopping"}),
        (lambda state: state.fail("no memory"), {"status": "failed", "detail": "no memory"}),
    ],
)
def test_health_until_ready(
    server: Server, change: Callable[[ServerState], None], health: dict[str, str]
) -> None:
    state, service = server.state, server.state.service()
    state.phase, state._service = Phase.CHECKING, None
    change(state)
    response = server.get("/health")
    told = response.json()
    told.pop("progress", None)
    assert (response.status_code, told) == (503, health)
    assert server.get("/ready").status_code == 503
    answer = server.chat()
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (health["status"], "server_error")
    assert health.get("detail", "not ready") in error["message"]
    state.become_ready(service)
    assert server.get("/health").status_code == server.chat().status_code == 200
    assert (server.get("/ready").status_code, server.get("/ready").json()) == (
        200,
        {"status": "ready"},
    )


def test_stopping_refuses_new_requests(server: Server) -> None:
    server.state.stop()
    assert server.chat().status_code == 503
    assert server.get("/health").json() == {"status": "stopping"}


def test_an_empty_step_is_done() -> None:
    state = ServerState()
    state.report_progress("loading draft", 0, 0)
    assert state.ready() == {
        "status": "loading",
        "detail": "loading draft: 100 %",
        "progress": {"step": "loading draft", "done": 0, "total": 0},
    }
