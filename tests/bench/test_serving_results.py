"""Percentiles and loops of texts."""

import pytest

from eyas.bench.serving_results import Percentiles, served_acceptance, text_loops


def test_percentiles() -> None:
    found = Percentiles.of([float(n) for n in reversed(range(101))])
    assert found == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert Percentiles.of([0.0, 1.0]) == Percentiles(0.5, pytest.approx(0.9), pytest.approx(0.99))
    assert Percentiles.of([]) is None


PROSE = (
    "The keeper of the lighthouse wound the clocks one by one, and when the last of them began to "
    "tick he noticed that its hands were turning the wrong way. He wrote to his sister about it."
)


def test_loops_of_texts() -> None:
    assert not text_loops(PROSE)
    assert text_loops("I do not know. " * 40)
    assert text_loops("- \n" * 100)
    assert not text_loops("") and not text_loops("yes")


def test_acceptance() -> None:
    before = {"eyas_round_requests_total": 100.0, "eyas_round_tokens_total": 150.0}
    after = {"eyas_round_requests_total": 200.0, "eyas_round_tokens_total": 400.0}
    assert served_acceptance([PROSE], before, after).length == 2.5
    assert served_acceptance([PROSE, "so " * 99], before, after).length is None
    assert served_acceptance([PROSE], before, before).length is None
    assert served_acceptance([PROSE], {}, {}).length is None
