"""The statistics, and the comparison of outputs."""

import pytest

from eyas.bench.results import (
    Acceptance,
    OutputCheck,
    Sample,
    Spread,
    compare_outputs,
    count_bigrams,
)
from eyas.bench.timing import Rates

RATES = Rates(4, 1.0, 0.5, 3, 0.5)


def sample(*outputs: tuple[list[int], int, int]) -> Sample:
    """Of (token ids, rounds, tokens of rounds)."""
    return Sample([o[0] for o in outputs], RATES, [(o[1], o[2]) for o in outputs])


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 9.0]) == Spread(2.5, 1.0, 9.0)


def test_the_ratio_is_taken_within_each_repeat() -> None:
    # The machine halved its speed in the second repeat: the ratio does not see it.
    assert Spread.of_ratios([40.0, 20.0], [20.0, 10.0]) == Spread(2.0, 2.0, 2.0)


def test_acceptance_is_tokens_by_forwards_over_all_outputs() -> None:
    acceptance = Acceptance.of(sample((list(range(40)), 10, 39), (list(range(30)), 10, 21)))
    assert acceptance == Acceptance(3.0, 2, 0)


def test_acceptance_leaves_looping_outputs_out() -> None:
    acceptance = Acceptance.of(sample(([1, 2] * 50, 25, 99), (list(range(30)), 10, 21)))
    assert acceptance == Acceptance(2.1, 2, 1)


def test_acceptance_of_loops_alone_is_refused() -> None:
    assert Acceptance.of(sample(([1, 2] * 50, 25, 99))) == Acceptance(None, 1, 1)


def test_simulated_acceptance_minds_no_loops() -> None:
    acceptance = Acceptance.of(sample(([1, 2] * 50, 25, 50)), is_simulated=True)
    assert acceptance == Acceptance(2.0, 1, 0, is_simulated=True)


def test_joined_samples() -> None:
    both = Sample.joined([sample(([1], 1, 2)), sample(([2], 3, 4))])
    assert both.token_ids == [[1], [2]]
    assert both.rounds == [(1, 2), (3, 4)]
    assert both.rates.num_tokens == 8


def test_equal_outputs() -> None:
    outputs = [[1, 2], [3, 4]]
    check = compare_outputs(("a", outputs), ("b", outputs), batch_size=2)
    assert check == OutputCheck("a", "b", 2, 2, 2)
    assert check.equal


@pytest.mark.parametrize(("gap", "is_tie"), [(1e-5, True), (-1e-5, True), (0.5, False)])
def test_the_first_difference_is_told(gap: float, is_tie: bool) -> None:
    asked = []

    def logit_gap(prompt: int, generated: list[int], first: int, second: int) -> float:
        asked.append((prompt, generated, first, second))
        return gap

    check = compare_outputs(
        ("a", [[1, 2], [3, 5, 9], [0]]),
        ("b", [[1, 2], [3, 4, 9], [1]]),
        batch_size=1,
        logit_gap=logit_gap,
    )
    assert asked == [(1, [3], 4, 5)]
    assert check == OutputCheck("a", "b", 1, 3, 1, 1, 1, (4, 5), gap)
    assert (check.equal, check.is_near_tie) == (False, is_tie)


def test_without_logits_a_difference_is_no_near_tie() -> None:
    check = compare_outputs(("a", [[1]]), ("b", [[2]]), batch_size=1)
    assert not check.equal and not check.is_near_tie


def test_bigrams_are_counted_within_outputs() -> None:
    assert count_bigrams([[1, 2, 1, 2], [1, 2], []]) == (3, 4)
