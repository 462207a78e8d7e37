"""Times of a start."""

import pytest

from eyas.engine import stages
from eyas.engine.stages import StageClock, describe


def test_stages_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.5, 20.0, 20.25])
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(times))
    clock = StageClock()
    clock.lap("import")
    clock.replace({"check": 2.0, "load": 6.0})  # of the 8.5 seconds since
    clock.lap("capture")
    assert clock.seconds == {"import": 1.5, "check": 2.0, "load": 6.0, "capture": 0.25}
    assert describe(clock.seconds) == (
        "import 1.5 s, check 2.0 s, load 6.0 s, capture 0.2 s; 9.8 s in all"
    )
