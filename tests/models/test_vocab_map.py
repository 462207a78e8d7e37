"""The invariants of d2t and t2d."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.models.vocab_map import map_findings

KEPT = torch.tensor([0, 3, 4, 9, 15])
D2T = KEPT - torch.arange(5)
T2D = torch.zeros(16, dtype=torch.bool).index_fill(0, KEPT, True)


def codes(d2t: torch.Tensor, t2d: torch.Tensor | None, size: int = 16) -> list[str]:
    return [finding.code for finding in map_findings(d2t, t2d, target_vocab_size=size)]


@given(st.sets(st.integers(0, 199), min_size=1, max_size=150))
def test_every_right_map_passes(kept_ids: set[int]) -> None:
    kept = torch.tensor(sorted(kept_ids))
    d2t = kept - torch.arange(len(kept))
    t2d = torch.zeros(200, dtype=torch.bool).index_fill(0, kept, True)
    # A map of the first ids is right too, and suspicious.
    expected = [] if d2t.any() else ["vocab-map-identity"]
    assert codes(d2t, t2d, 200) == expected
    assert codes(d2t, None, 200) == expected
    assert codes(d2t.to(torch.int32), None, 200) == expected


def test_the_whole_vocabulary_is_no_suspicion() -> None:
    assert codes(torch.zeros(16, dtype=torch.int64), torch.ones(16, dtype=torch.bool)) == []


@pytest.mark.parametrize(
    ("d2t", "t2d", "code"),
    [
        (D2T.to(torch.bfloat16), T2D, "vocab-map-dtype"),
        (KEPT, T2D, "vocab-map-absolute"),
        (KEPT, None, "vocab-map-absolute"),
        (D2T + 8, None, "vocab-map-out-of-range"),
        (D2T - 1, None, "vocab-map-out-of-range"),
        (torch.tensor([0, 3, 0, 6, 11]), None, "vocab-map-not-ascending"),
        (torch.tensor([0, 3, 2, 6, 11]), None, "vocab-map-not-ascending"),  # 4 twice
        (torch.zeros(5, dtype=torch.int64), T2D, "vocab-maps-disagree"),
        (D2T, T2D.roll(1), "vocab-maps-disagree"),
        (D2T[:4], T2D, "vocab-maps-disagree"),
    ],
)
def test_wrong_maps(d2t: torch.Tensor, t2d: torch.Tensor | None, code: str) -> None:
    assert codes(d2t, t2d) == [code]


def test_numbers_are_told() -> None:
    (finding,) = map_findings(D2T + 8, None, target_vocab_size=16)
    assert "2 draft ids" in finding.message and "draft id 3 to 17" in finding.message
