"""The draft's step in one call against the torch modules: the same numbers but for int8 weights.

Shape suffixes: T rows, H hidden, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from fixtures.tiny import draft_config, llama_config, load_named, random_weights, tiny_target
from torch import Tensor

from eyas.attention.torch_backend import TorchAttention, TorchBackend
from eyas.cache.pool import KVPool
from eyas.kernels import native, native_draft
from eyas.models.config import DraftConfig
from eyas.models.eagle3 import Eagle3Draft
from eyas.models.linear import optimize_for_cpu

MAX_ROWS = native_draft.MAX_ROWS
LENGTH = 37  # of the prefix, over three pages


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    if not native.status().startswith("native"):
        pytest.skip(native.status())
    with torch.inference_mode():
        yield


def small_config(**changes: object) -> DraftConfig:
    """Widths of whole vectors; heads as wide as two of them."""
    decoder = llama_config(
        num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=32, intermediate_size=48
    )
    return draft_config(decoder, **{"draft_vocab_size": 41, **changes})


def make_draft(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> Eagle3Draft:
    """A random draft on a random target."""
    target = tiny_target().to(dtype)
    draft = Eagle3Draft(config, dtype=dtype, device="cpu")
    load_named(draft, random_weights(draft, 1))
    draft.share_with_target(target)
    return draft


def random(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.bfloat16)


class Bench:
    """One pool with a prefix, and the same rows to run."""

    def __init__(self, draft: Eagle3Draft, num_rows: int) -> None:
        self.draft, self.num_rows = draft, num_rows
        self.pool = KVPool(
            draft.kv_layout,
            num_pages=8,
            page_size=16,
            num_slots=2,
            num_scratch_rows=MAX_ROWS + 1,
            dtype=draft.fc.weight.dtype,
            device="cpu",
        )
        for number, cache in enumerate((self.pool.k_LRKD, self.pool.v_LRKD)):
            cache.copy_(random(*cache.shape, seed=number))
        generator = torch.Generator().manual_seed(num_rows)
        self.tokens_T = torch.randint(0, 64, (num_rows,), generator=generator)
        self.hidden_TH = random(num_rows, 32, seed=7).to(draft.fc.weight.dtype)
        self.position_T = LENGTH + torch.arange(num_rows)
        self.before = (self.pool.k_LRKD.clone(), self.pool.v_LRKD.clone())

    def plan(self) -> TorchAttention:
        visible = torch.ones(1, self.num_rows, self.num_rows, dtype=torch.bool).tril()
        return TorchBackend(self.pool).plan_tree(
            page_table_BP=torch.tensor([[5, 2, 7, 3]]),
            slots_B=torch.tensor([1]),
            first_index=1,
            end_index_B=torch.tensor([LENGTH]),
            visible_BQN=visible,
            first_node=0,
            max_kv_len=48,
        )

    def step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logits, hidden, keys, values) of one forward; the pool is as it was before."""
        output = self.draft.forward(
            self.tokens_T,
            self.hidden_TH,
            self.position_T,
            torch.ones(self.num_rows, dtype=torch.int64),
            self.plan(),
        )
        return output.logits_TV, output.hidden_TH, *self.restored()

    def write(self) -> tuple[Tensor, Tensor]:
        """(keys, values) after write_kv."""
        rows_T = 20 + 3 * torch.arange(self.num_rows)
        plan = TorchBackend(self.pool).plan_write(rows_T)
        self.draft.write_kv(self.tokens_T, self.hidden_TH, self.position_T, plan)
        return self.restored()

    def restored(self) -> tuple[Tensor, Tensor]:
        after = (self.pool.k_LRKD.clone(), self.pool.v_LRKD.clone())
        self.pool.k_LRKD.copy_(self.before[0])
        self.pool.v_LRKD.copy_(self.before[1])
        return after


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """But for the rounding of weights to int8, by up to 1/254 of the largest in a row."""
    assert (actual.float() - expected.float()).abs().max() < 0.12 * expected.float().std()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_residual": True}, {"norm_output": True}, {"has_head": False}]
)
def test_a_step_is_that_of_the_modules(flags: dict[str, bool], num_rows: int) -> None:
    more = {"draft_vocab_size": 64, "has_d2t": False} if "has_head" in flags else {}
    draft = make_draft(small_config(**flags, **more))
    bench = Bench(draft, num_rows)
    logits_TV, hidden_TH, *cache = bench.step()
    assert logits_TV.dtype == torch.bfloat16
    assert draft.fuse()
    fused_logits_TV, fused_hidden_TH, *fused_cache = bench.step()
    assert fused_logits_TV.dtype == torch.float32  # so it was the one call
    assert_same(fused_hidden_TH, hidden_TH)
    for actual, expected, before in zip(fused_cache, cache, bench.before, strict=True):
        assert_same(actual, expected)
        assert (actual != before).any(-1).sum() == num_rows * 2  # heads of the new rows alone
    assert_same(fused_logits_TV, logits_TV)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_entries_and_combined_features_are_those_of_the_modules(num_rows: int) -> None:
    draft = make_draft(small_config())
    bench, features_TF = Bench(draft, num_rows), random(num_rows, 96, seed=3)
    expected, combined_TH = bench.write(), draft.combine(features_TF)
    assert draft.fuse()
    for actual, wanted, before in zip(bench.write(), expected, bench.before, strict=True):
        assert_same(actual, wanted)
        assert (actual != before).any(-1).sum() == num_rows * 2
    assert_same(draft.combine(features_TF), combined_TH)
    assert_same(draft.combine(features_TF.flip(1).flip(1)), combined_TH)


def test_norms_and_biases_before_and_after_fc_stay_with_the_modules() -> None:
    features_TF = random(2, 96, seed=3)
    for flags in ({"norm_before_fc": True}, {"fc_norm": True}, {"fc_bias": True}):
        draft = make_draft(small_config(**flags))
        expected = draft.combine(features_TF)
        assert draft.fuse()
        torch.testing.assert_close(draft.combine(features_TF), expected, rtol=0, atol=0)


def test_threads_do_not_change_it() -> None:
    draft = make_draft(small_config())
    assert draft.fuse()
    bench, before = Bench(draft, 3), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(bench.step())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert torch.equal(actual, expected)


def test_what_is_left_to_the_modules() -> None:
    """More rows, switched off, after the linears have been packed: still right."""
    draft = make_draft(small_config())
    plain = [Bench(draft, MAX_ROWS + 1).step()]
    with native.disabled():
        plain.append(Bench(draft, 2).step())
    assert draft.fuse()
    optimize_for_cpu(draft, 1)
    many = Bench(draft, MAX_ROWS + 1).step()
    with native.disabled():
        few = Bench(draft, 2).step()
    for actual, expected in zip((many, few), plain, strict=True):
        assert actual[0].dtype == torch.bfloat16
        assert_same(actual[1], expected[1])
    assert Bench(draft, 2).step()[0].dtype == torch.float32


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True},
        {"o_bias": True},
        {"mlp_bias": True},
        {"qk_norm": True},
        {"head_dim": 10},  # heads of 40 numbers in all: no whole vectors
        {"intermediate_size": 40},
    ],
)
def test_shapes_that_are_not_fused(changes: dict[str, object]) -> None:
    config = small_config()
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, **changes))
    assert not make_draft(config).fuse()


def test_other_dtypes_large_drafts_and_no_library_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not make_draft(small_config(), torch.float32).fuse()
    with native.disabled():
        assert not make_draft(small_config()).fuse()
    monkeypatch.setattr(native_draft, "MAX_WEIGHTS", 1000)
    assert not make_draft(small_config()).fuse()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(41, 32), (5000, 96), (7, 576), (64, 1728)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_products(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    """Against the same weights in fp64, and against the exact ones within the rounding's bound."""
    weight_OI, x_TI = random(*shape, seed=1), 3 * random(num_rows, shape[1], seed=2)
    weight_OI[3] *= 50
    x_TI[-1, 3] = 200
    weight = native_draft.Int8Weight.of(weight_OI)
    y_TO = weight.product(x_TI, dtype)
    assert y_TO.dtype == dtype
    x = x_TI.double()
    same_TO = x @ weight.weight_OI.double().T * weight.scale_O
    step_T1 = x.abs().amax(1, keepdim=True) / 32512
    bound_TO = step_T1 * weight_OI.double().abs().sum(1) / 2 + 1e-5 * same_TO.abs()
    bound_TO += same_TO.abs() * 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((y_TO - same_TO).abs() <= bound_TO).all()
    rounding_TO = x.abs().sum(1)[:, None] * weight.scale_O / 2
    exact_TO = x @ weight_OI.double().T
    assert ((y_TO - exact_TO).abs() <= bound_TO + 1.01 * rounding_TO).all()


def test_rows_of_zeros_and_rows_that_are_no_numbers() -> None:
    weight = native_draft.Int8Weight.of(random(20, 32))
    for value in (0.0, math.nan, math.inf, -math.inf):
        x_TI = random(3, 32, seed=1)
        x_TI[1] *= 0
        x_TI[1, 5] = value
        y_TO = weight.product(x_TI, torch.float32)
        assert (y_TO[1] == 0).all() if value == 0 else y_TO[1].isnan().all()
        assert y_TO[[0, 2]].isfinite().all()
