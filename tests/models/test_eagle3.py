"""The EAGLE-3 draft against a row-by-row re-implementation, for every shape and norm flag."""

import dataclasses
import itertools

import pytest
import torch
from fixtures.slow_draft import SlowDraft, SlowOutput
from fixtures.tiny import (
    VOCAB,
    draft_config,
    fresh_backend,
    kept_ids,
    llama_config,
    tiny_draft,
    tiny_draft_and_weights,
    tiny_target,
)
from torch import Tensor

from eyas.attention.torch_backend import TorchBackend
from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.contract.draft import DraftOutput
from eyas.models.config import DraftConfig, ModelConfig, RopeConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.types import EyasError

NUM_PAIRS, NUM_STEPS, PAGE_SIZE = 11, 7, 4
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def decoder(**changes: object) -> ModelConfig:
    """The decoder of `draft_config`, changed."""
    return dataclasses.replace(draft_config().decoder, **changes)


# Everything but the norm flags in which drafts in the wild differ.
SHAPES: dict[str, DraftConfig] = {
    "plain": draft_config(),
    "one head size": draft_config(decoder(num_heads=4, num_kv_heads=2, head_dim=8)),
    "own embedding": draft_config(has_embedding=True),
    "narrower": draft_config(
        decoder(hidden_size=20, head_dim=16, num_heads=2, num_kv_heads=2), has_embedding=True
    ),
    "as wide as the features": draft_config(
        decoder(hidden_size=64), boundaries=(0, 4), has_embedding=True
    ),
    "full vocabulary": draft_config(draft_vocab_size=VOCAB, has_d2t=False),
    "no head": draft_config(draft_vocab_size=VOCAB, has_d2t=False, has_head=False),
    "five states": draft_config(boundaries=(0, 1, 2, 3, 4)),
    "fc bias, own theta": draft_config(decoder(rope=RopeConfig(theta=50.0)), fc_bias=True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Base pairs and forced tokens for the recurrent steps, with both implementations."""

    draft: Eagle3Draft
    slow: SlowDraft
    tokens: list[int]
    features_TF: Tensor
    forced: list[int]


def make_case(config: DraftConfig) -> Case:
    draft, weights = tiny_draft_and_weights(tiny_target(), config)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCAB, (NUM_PAIRS + NUM_STEPS,), generator=generator).tolist()
    features_TF = torch.randn(NUM_PAIRS, config.num_features, generator=generator) * 2
    slow = SlowDraft(config, weights)
    return Case(draft, slow, tokens[:NUM_PAIRS], features_TF, tokens[NUM_PAIRS:])


def slow_steps(case: Case, *, shift: int = 0, recurrent_shift: int = 0) -> list[SlowOutput]:
    """The last base pair's output, and those of the recurrent steps that follow it."""
    slow = case.slow
    hidden = [slow.combine(features) for features in case.features_TF]
    past = [
        slow.entry(token, s, position + shift)
        for position, (token, s) in enumerate(zip(case.tokens, hidden, strict=True))
    ]
    last = NUM_PAIRS - 1
    outputs = [slow.step(case.tokens[last], hidden[last], last + shift, past=past[:last])]
    for step, token in enumerate(case.forced):
        position = NUM_PAIRS + step + shift + recurrent_shift
        out = slow.step(token, outputs[-1].hidden, position, past=past)
        outputs.append(out)
        past.append(out.entry)
    return outputs


def plan_row(backend: TorchBackend, table_1P: Tensor, *, end: int, node: int) -> object:
    """A plan of one row over cache indices 1 .. end - 1 and scratch nodes 0 .. node."""
    return backend.plan_tree(
        page_table_BP=table_1P,
        slots_B=torch.zeros(1, dtype=torch.int64),
        first_index=1,
        end_index_B=torch.tensor([end]),
        visible_BQN=torch.ones(1, 1, node + 1, dtype=torch.bool),
        first_node=node,
        max_kv_len=end,
    )


@torch.inference_mode()
def fast_steps(case: Case, *, shift: int = 0, recurrent_shift: int = 0) -> list[DraftOutput]:
    """The same through the engine's model and cache: base pairs in pages, the rest in scratch."""
    draft = case.draft
    backend = fresh_backend(draft.kv_layout, num_pages=8, page_size=PAGE_SIZE)
    table_1P = torch.arange(7, -1, -1)[None] + NUM_RESERVED_PAGES
    tokens_T, position_T = torch.tensor(case.tokens), torch.arange(NUM_PAIRS)
    hidden_TH = draft.combine(case.features_TF)
    rows_T = backend.page_rows(table_1P, position_T[None] + 1)[0]
    draft.write_kv(tokens_T, hidden_TH, position_T + shift, backend.plan_write(rows_T))
    slots = torch.zeros(1, dtype=torch.int64)
    plan = plan_row(backend, table_1P, end=NUM_PAIRS, node=0)
    last = slice(NUM_PAIRS - 1, NUM_PAIRS)
    outputs = [
        draft.forward(tokens_T[last], hidden_TH[last], position_T[last] + shift, slots, plan)
    ]
    for step, token in enumerate(case.forced):
        plan = plan_row(backend, table_1P, end=NUM_PAIRS + 1, node=step)
        position = torch.tensor([NUM_PAIRS + step + shift + recurrent_shift])
        hidden_1H = outputs[-1].hidden_TH
        outputs.append(draft.forward(torch.tensor([token]), hidden_1H, position, slots, plan))
    return outputs


def assert_equal_steps(slow: list[SlowOutput], fast: list[DraftOutput]) -> None:
    assert len(slow) == len(fast) == NUM_STEPS + 1
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours.logits_TV[0], theirs.logits.float(), atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(ours.hidden_TH[0], theirs.hidden.float(), atol=2e-4, rtol=1e-4)


def flag_sets() -> list[dict[str, bool]]:
    """All combinations; norm_before_fc and fc_norm exclude one another in practice, not here."""
    return [
        dict(zip(FLAGS, values, strict=True))
        for values in itertools.product((False, True), repeat=len(FLAGS))
    ]


@pytest.mark.parametrize("flags", flag_sets(), ids=lambda f: "-".join(k for k in f if f[k]))
def test_every_norm_flag_equals_the_slow_draft(flags: dict[str, bool]) -> None:
    case = make_case(draft_config(**flags))
    assert_equal_steps(slow_steps(case), fast_steps(case))


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("modern", [False, True])
def test_every_shape_equals_the_slow_draft(shape: str, modern: bool) -> None:
    config = dataclasses.replace(
        SHAPES[shape], fc_norm=modern, norm_output=modern, norm_before_residual=modern
    )
    case = make_case(config)
    assert_equal_steps(slow_steps(case), fast_steps(case))


@pytest.mark.parametrize("flag", FLAGS)
def test_every_norm_flag_changes_the_output(flag: str) -> None:
    """A flag that is read and dropped would pass the comparison with itself; not this."""
    off, on = make_case(draft_config()), make_case(draft_config(**{flag: True}))
    steps = list(zip(fast_steps(off), fast_steps(on), strict=True))
    first = NUM_STEPS if flag == "norm_output" else 0  # only what is fed back differs
    for before, after in steps[first:]:
        assert (before.logits_TV - after.logits_TV).abs().max() > 0.05
    if flag == "norm_output":
        assert torch.equal(steps[0][0].logits_TV, steps[0][1].logits_TV)


def test_fc_runs_once_for_the_base_pairs_only() -> None:
    """Also where the features are as wide as the hidden state: no guess by width (trap 6)."""
    config = draft_config(decoder(hidden_size=64), boundaries=(1, 3), has_embedding=True)
    case, calls = make_case(config), list[int]()
    case.draft.fc.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    fast_steps(case)
    assert calls == [NUM_PAIRS]


def test_a_shift_of_all_positions_changes_nothing() -> None:
    case = make_case(draft_config())
    plain, moved = fast_steps(case), fast_steps(case, shift=37)
    for before, after in zip(plain, moved, strict=True):
        torch.testing.assert_close(before.logits_TV, after.logits_TV, atol=1e-4, rtol=0)


def test_a_shift_of_the_recurrent_rows_only_changes_them() -> None:
    case = make_case(draft_config())
    plain, moved = fast_steps(case), fast_steps(case, recurrent_shift=1)
    assert torch.equal(plain[0].logits_TV, moved[0].logits_TV)
    for before, after in zip(plain[1:], moved[1:], strict=True):
        assert (before.logits_TV - after.logits_TV).abs().max() > 1e-3
    assert_equal_steps(slow_steps(case, recurrent_shift=1), moved)


def test_the_halves_of_the_input_are_not_interchangeable() -> None:
    """Embedding first: swapping the halves of q, k and v gives another model (trap 3)."""
    case = make_case(draft_config())
    swapped = dict(case.slow.weights)
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        swapped[name] = swapped[name].roll(32, dims=1)
    other = SlowDraft(case.slow.config, swapped)
    right, wrong = slow_steps(case), slow_steps(dataclasses.replace(case, slow=other))
    assert (right[0].logits - wrong[0].logits).abs().max() > 0.05
    assert_equal_steps(right, fast_steps(case))


@pytest.mark.parametrize("size", [41, VOCAB])
def test_target_ids_are_offsets_added_once(size: int) -> None:
    draft = tiny_draft(tiny_target(), draft_config(draft_vocab_size=size))
    assert draft.target_ids_V.dtype == torch.int64
    assert torch.equal(draft.target_ids_V, kept_ids(size, VOCAB))


def test_the_map_survives_a_cast() -> None:
    """bf16 holds integers up to 256 only (trap 7)."""
    config = draft_config(decoder(vocab_size=1000), draft_vocab_size=700)
    target = tiny_target(llama_config(vocab_size=1000))
    draft = tiny_draft(target, config).to(torch.bfloat16)
    draft.share_with_target(target)
    assert draft.d2t.dtype == torch.int64
    assert torch.equal(draft.target_ids_V, kept_ids(700, 1000))


def test_what_the_checkpoint_lacks_is_shared_and_what_it_has_is_kept() -> None:
    target = tiny_target()
    embed_VH, head_VH = target.get_embed_and_head()
    shares = tiny_draft(target, draft_config(draft_vocab_size=VOCAB, has_d2t=False, has_head=False))
    assert shares.embed_tokens is not None and shares.lm_head is not None
    assert shares.embed_tokens.weight.data_ptr() == embed_VH.data_ptr()
    assert shares.lm_head.weight.data_ptr() == head_VH.data_ptr()
    brings = tiny_draft(target, draft_config(has_embedding=True))
    assert brings.embed_tokens is not None and brings.lm_head is not None
    assert brings.embed_tokens.weight.data_ptr() != embed_VH.data_ptr()
    assert brings.lm_head.weight.data_ptr() not in (embed_VH.data_ptr(), head_VH.data_ptr())


def test_a_narrower_draft_without_an_embedding_is_refused() -> None:
    with pytest.raises(EyasError, match="no embedding of its own"):
        tiny_draft(tiny_target(), draft_config(decoder(hidden_size=20)))


def test_describes_itself() -> None:
    draft = tiny_draft(tiny_target(), draft_config(decoder(hidden_size=20), has_embedding=True))
    assert (draft.hidden_size, draft.draft_vocab_size, draft.boundaries) == (20, 41, (1, 2, 4))
    layout = draft.kv_layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (1, 1, 10)
