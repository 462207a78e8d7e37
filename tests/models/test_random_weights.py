"""Random weights keep a forward in range."""

import pytest
import torch
from fixtures.tiny import draft_config, llama_config

from eyas.models.eagle3 import Eagle3Draft
from eyas.models.llama import LlamaForCausalLM
from eyas.models.random_weights import even_map, fill_random


def filled(seed: int, **changes: object) -> LlamaForCausalLM:
    config = llama_config(hidden_size=64, intermediate_size=128, **changes)
    model = LlamaForCausalLM(config, dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    fill_random(model, num_layers=config.num_layers, seed=seed)
    return model


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"tie_word_embeddings": True}])
def test_everything_is_filled_and_repeatable(changes: dict[str, object]) -> None:
    first, again, other = filled(1, **changes), filled(1, **changes), filled(2, **changes)
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.isfinite(a).all() and torch.equal(a, b), name
        if a.dim() > 1 or name.endswith("bias"):
            assert not torch.equal(a, c), name
        else:
            assert (a == 1).all(), name


def test_the_scale_of_linears() -> None:
    model = filled(0, num_layers=2)
    down = model.model.layers[0].mlp.down_proj.weight
    assert model.lm_head.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert down.std().item() == pytest.approx((2 * 2 * 128) ** -0.5, rel=0.1)


def test_a_drafts_map_is_ascending_and_inside() -> None:
    config = draft_config()
    draft = Eagle3Draft(config, dtype=torch.float32, device="cpu")
    fill_random(draft, num_layers=1, seed=0)
    ids = torch.arange(config.draft_vocab_size) + draft.d2t
    assert (ids.diff() > 0).all() and 0 <= int(ids[0]) and int(ids[-1]) < config.decoder.vocab_size


def test_an_even_map() -> None:
    assert (even_map(4, 10) + torch.arange(4)).tolist() == [0, 2, 5, 7]
