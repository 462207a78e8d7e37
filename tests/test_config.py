"""Settings: what a shape and an engine's configuration refuse, and the defaults that depend."""

import pytest

from eyas.config import MAX_TREE_NODES, PLAIN, ConfigError, EngineConfig, TreeShape


def with_draft(**settings: object) -> EngineConfig:
    return EngineConfig(model="target", draft="draft", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({}, TreeShape(3, 1, 4)),
        ({"num_speculative_tokens": 5}, TreeShape(5, 1, 6)),
        ({"num_speculative_tokens": 0}, PLAIN),
        ({"num_speculative_tokens": 0, "num_tree_nodes": 1}, PLAIN),
        ({"num_speculative_tokens": 2, "topk": 3}, TreeShape(2, 3, 13)),
        ({"num_speculative_tokens": 6, "topk": 8}, TreeShape(6, 8, MAX_TREE_NODES)),
        ({"num_speculative_tokens": 2, "topk": 3, "num_tree_nodes": 9}, TreeShape(2, 3, 9)),
    ],
)
def test_the_shape_of_a_round(settings: dict[str, int], shape: TreeShape) -> None:
    assert with_draft(**settings).tree_shape() == shape


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_tree_nodes": 0}, "between 4 and 4 nodes"),
        ({"num_speculative_tokens": -1}, "depth >= 0"),
        ({"num_speculative_tokens": 0, "topk": 4}, "leave them out"),
        ({"num_speculative_tokens": 0, "num_tree_nodes": 8}, "leave them out"),
        ({"num_speculative_tokens": 64}, f"and {MAX_TREE_NODES} nodes"),
        ({"run_ahead": 2}, "--run-ahead must be 0 or 1"),
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"kv_cache_tokens": 0}, "--kv-cache-tokens must be at least 1"),
        ({"draft_boundaries": ()}, "--draft-boundaries names none"),
        ({"simulate_acceptance": (4.5,)}, "out of reach"),
        ({"simulate_acceptance": (0.5, 0.5)}, "or 3 chances"),
    ],
)
def test_what_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        with_draft(**settings)


@pytest.mark.parametrize("setting", ["topk", "num_tree_nodes", "num_speculative_tokens"])
@pytest.mark.parametrize("draft", [None, "none"])
def test_settings_of_a_draft_need_one(setting: str, draft: str | None) -> None:
    with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')} needs a draft"):
        EngineConfig(model="target", draft=draft, **{setting: 4})  # type: ignore[arg-type]


def test_a_target_with_a_draft_of_its_own_uses_it_unless_told() -> None:
    assert EngineConfig(model="smollm2-135m").draft_name == "smollm2-135m-eagle3"
    assert EngineConfig(model="smollm2-135m", draft="mine").draft_name == "mine"
    plain = EngineConfig(model="smollm2-135m", draft="none")
    assert plain.draft_name is None and plain.tree_shape() == PLAIN
    assert EngineConfig(model="target").draft_name is None


@pytest.mark.parametrize("length", [1.0, 2.5, 4.0])
def test_a_simulated_length_is_the_mean_of_its_rates(length: float) -> None:
    rates = with_draft(simulate_acceptance=(length,)).acceptance_rates()
    assert rates is not None and len(rates) == 3
    assert 1 + rates[0] + rates[0] ** 2 + rates[0] ** 3 == pytest.approx(length)
