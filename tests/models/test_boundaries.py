"""Layer ids of all conventions in the wild, as boundaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.models.boundaries import (
    default_boundaries,
    report_boundaries,
    translate_layer_ids,
)
from eyas.models.findings import Findings

# (ids, layers of the target, format, boundaries, whether neither default matched)
PUBLISHED = [
    ([2, 30, 58], 61, "specforge", (2, 30, 58), False),  # AQ-MedAI Kimi-K2
    ([1, 29, 57], 61, "specforge", (2, 30, 58), False),  # lightseek k2.7: the same tensors
    ([1, 46, 90], 94, "specforge", (2, 47, 91), False),  # lmsys Qwen3-235B
    ([1, 46, 90], 94, "speculators", (2, 47, 91), False),  # the same, converted
    ([2, 16, 29], 32, "speculators", (2, 16, 29), False),
    ([24, 30, 36], 36, "specforge", (24, 30, 36), False),  # nvidia gpt-oss-120b v3
    ([1, 17, 32], 36, "specforge", (2, 18, 33), False),  # nvidia long context
    ([1, 17, 33], 36, "specforge", (2, 18, 34), True),  # SpecForge gpt-oss-120b
    ([1, 11, 21], 24, "specforge", (2, 12, 22), True),  # SpecForge gpt-oss-20b
    ([3, 5], 8, "speculators", (3, 5), True),
    ([3, 5], 8, "safeailab", (4, 6), True),
    ([2, 4, 5, 8], 8, "speculators", (2, 4, 5, 8), False),  # four states, the last layer included
    ([2, 4, 5, 8], 8, "specforge", (2, 4, 5, 8), False),
]


@pytest.mark.parametrize(("ids", "num_layers", "format", "boundaries", "is_guess"), PUBLISHED)
def test_published_drafts(ids, num_layers, format, boundaries, is_guess) -> None:  # type: ignore[no-untyped-def]
    choice = translate_layer_ids(ids, num_layers=num_layers, format=format)
    assert (choice.boundaries, choice.is_guess) == (boundaries, is_guess)
    assert str(list(ids)) in choice.rule


@given(st.integers(8, 100), st.sampled_from(["safeailab", "specforge", "speculators"]))
def test_both_notations_of_the_default_agree(num_layers: int, format: str) -> None:
    default = default_boundaries(num_layers)
    for ids in (default, [i - 1 for i in default]):
        choice = translate_layer_ids(ids, num_layers=num_layers, format=format)  # type: ignore[arg-type]
        assert choice.boundaries == default and not choice.is_guess


@pytest.mark.parametrize(
    ("boundaries", "code"),
    [
        ([0, 4, 8], None),
        ([2, 4, 9], "boundaries-out-of-range"),
        ([-1, 4, 5], "boundaries-out-of-range"),
        ([2, 4, 4], "boundaries-repeated"),
        ([4, 2, 5], "boundaries-not-ascending"),
    ],
)
def test_what_is_wrong_with_boundaries(boundaries: list[int], code: str | None) -> None:
    findings = Findings()
    report_boundaries(boundaries, num_layers=8, findings=findings)
    assert [f.code for f in findings.errors] == ([] if code is None else [code])


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_small_targets_get_distinct_defaults_or_a_finding(num_layers: int) -> None:
    boundaries = default_boundaries(num_layers)
    findings = Findings()
    report_boundaries(boundaries, num_layers=num_layers, findings=findings)
    assert bool(findings.errors) == (num_layers < 7)
