"""Linear layers: merged parts, and the packed weight that must compute the same."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from fixtures.tiny import full_forward, llama_config, tiny_target
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.models import linear
from eyas.models.linear import (
    Linear,
    choose_cpu_layout,
    optimize_for_cpu,
    pack,
    run_packed,
    timing_sample,
)

CPU = "cpu"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> Linear:
    layer = Linear(24, 17, bias=bias, dtype=dtype, device=CPU)
    layer.weight.data.copy_(randn(17, 24))
    if layer.bias is not None:
        layer.bias.data.copy_(randn(17, seed=1))
    return layer


@pytest.fixture
def always_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU where packing pays."""
    monkeypatch.setattr(linear, "choose_cpu_layout", lambda weights, num_rows: True)


needs_packing = pytest.mark.skipif(
    pack(torch.ones(4, 4), 1) is None, reason="this build of torch cannot pack weights"
)


@pytest.mark.parametrize("bias", [False, True])
def test_plain(bias: bool) -> None:
    layer, x_TI = make(bias=bias), randn(5, 24, seed=2)
    expected = x_TI @ layer.weight.T + (layer.bias if layer.bias is not None else 0)
    torch.testing.assert_close(layer(x_TI), expected)
    assert not layer.weight.requires_grad and (layer.bias is not None) == bias


def test_parts_are_stacked_rows_in_order() -> None:
    merged = Linear(8, {"q": 6, "k": 2, "v": 2}, bias=True, dtype=torch.float32, device=CPU)
    assert merged.parts == {"q": 6, "k": 2, "v": 2}
    assert merged.weight.shape == (10, 8) and merged.bias is not None
    assert merged.bias.shape == (10,)
    assert not hasattr(make(), "parts")


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 4, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    layer = make(bias=bias, dtype=dtype)
    packed = pack(layer.weight.data, 4)
    if packed is None:
        pytest.skip(f"no packed {dtype} on this CPU")
    x_TI = randn(num_rows, 24, seed=2, dtype=dtype)
    out = run_packed(x_TI, packed, layer.bias)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(out, layer(x_TI), atol=tolerance, rtol=tolerance)


@needs_packing
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_computes_the_same(tied: bool, always_packs: None) -> None:
    model = tiny_target(llama_config(tie_word_embeddings=tied, qkv_bias=True))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    before, _ = full_forward(model, tokens, (2,))
    logits_before = model.compute_logits(before.hidden_TH)
    assert optimize_for_cpu(model, 4)
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(linears) == 4 * 4 + 1 and all(m.packed is not None for m in linears)
    after, _ = full_forward(model, tokens, (2,))
    torch.testing.assert_close(after.hidden_TH, before.hidden_TH, atol=1e-4, rtol=1e-4)
    logits_after = model.compute_logits(after.hidden_TH)
    torch.testing.assert_close(logits_after, logits_before, atol=1e-4, rtol=1e-4)


@needs_packing
def test_packing_replaces_the_plain_weight(always_packs: None) -> None:
    """No weight is held twice, and a tied head keeps the copy that the embedding needs."""
    untied, tied = tiny_target(), tiny_target(llama_config(tie_word_embeddings=True))
    for model in (untied, tied):
        optimize_for_cpu(model, 4)
        for module in model.modules():
            if isinstance(module, Linear) and module is not model.lm_head:
                assert module.weight.is_meta
    assert untied.lm_head.weight.is_meta
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()
    assert not untied.model.embed_tokens.weight.is_meta
    tokens_T = torch.tensor([7])
    assert untied.model.embed_tokens(tokens_T).isfinite().all()


@needs_packing
def test_a_new_head_is_not_shadowed_by_the_packed_one(always_packs: None) -> None:
    model = tiny_target()
    embed_VH, head_VH = (w.clone() for w in model.get_embed_and_head())
    optimize_for_cpu(model, 4)
    model.set_embed_and_head(embed_VH, head_VH * 2)
    hidden_TH = randn(3, 32)
    torch.testing.assert_close(model.compute_logits(hidden_TH), F.linear(hidden_TH, head_VH * 2))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_the_private_calls_everything_stays_plain(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may go away with any release of torch, or refuse a dtype on this CPU."""

    class Mkldnn:
        @staticmethod
        def _reorder_linear_weight(*args: object) -> torch.Tensor:
            raise error("gone")

    monkeypatch.setattr(torch.ops, "mkldnn", Mkldnn, raising=False)
    layer = make()
    assert pack(layer.weight.data, 4) is None
    assert not choose_cpu_layout([layer.weight.data], 4)
    model = nn.Sequential(layer)
    assert not optimize_for_cpu(model, 4)
    assert layer.packed is None and not layer.weight.is_meta
    x_TI = randn(2, 24)
    assert torch.equal(model(x_TI), F.linear(x_TI, layer.weight))


def test_a_reorder_that_cannot_be_run_is_no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mkldnn:
        @staticmethod
        def _reorder_linear_weight(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
            return weight

    monkeypatch.setattr(torch.ops, "mkldnn", Mkldnn, raising=False)
    assert pack(torch.ones(4, 4), 1) is None


class Clock:
    """Moves only within the timed products, by what `cost` says of each in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.threads = 0.0, set[int]()
        monkeypatch.setattr(linear.time, "thread_time", lambda: self.now)
        self._patch = monkeypatch

    def charge(self, *, plain: Iterator[float], packed: Iterator[float]) -> None:
        self._patch.setattr(linear.F, "linear", self._ticking(F.linear, plain))
        self._patch.setattr(linear, "run_packed", self._ticking(run_packed, packed))

    def _ticking(self, function: Callable[..., Tensor], ticks: Iterator[float]) -> object:
        def call(*args: Tensor) -> Tensor:
            self.now += next(ticks)
            self.threads.add(torch.get_num_threads())
            return function(*args)

        return call


@needs_packing
@pytest.mark.parametrize(
    ("plain", "packed", "packs"),
    [(2.0, 1.5, True), (1.0, 1.5, False), (1.0, 1.05, True)],
    ids=["plain is slow", "packed is slow", "a near tie is packed"],
)
def test_the_faster_layout_is_chosen(
    plain: float, packed: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    clock.charge(plain=itertools.repeat(plain), packed=itertools.repeat(packed))
    assert choose_cpu_layout([randn(8, 8), randn(16, 8)], 2) == packs


@needs_packing
def test_bursts_of_other_work_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five passes are hit, in the layout that is faster; the first pass is warm-up."""
    clock = Clock(monkeypatch)
    probes = [1.0]  # pack tries its result
    clock.charge(
        plain=itertools.repeat(2.0), packed=iter(probes + [50.0, 1.0, 90.0, 1.0, 90.0, 1.0])
    )
    assert choose_cpu_layout([randn(8, 8)], 2)


@needs_packing
def test_one_thread_is_timed_and_the_number_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        clock = Clock(monkeypatch)
        clock.charge(plain=itertools.repeat(1.0), packed=itertools.repeat(1.0))
        assert choose_cpu_layout([randn(8, 8)], 2)
        assert clock.threads == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_timed_weights_have_every_shape_and_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SAMPLE_BYTES", 1000)
    monkeypatch.setattr(linear, "MAX_TIMED_BYTES", 512)
    small, large = [randn(4, 16, seed=i) for i in range(8)], randn(100, 16)
    sample = timing_sample([*small, large, large])
    assert [tuple(w.shape) for w in sample] == [(4, 16)] * 4 + [(8, 16)]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(sample[:4], small[:4], strict=True))


def test_a_model_without_linears_is_left_alone() -> None:
    assert not optimize_for_cpu(nn.LayerNorm(4), 1)


def test_weights_on_the_meta_device_are_left_alone() -> None:
    layer = Linear(4, 4, dtype=torch.float32, device="meta")
    assert not optimize_for_cpu(nn.Sequential(layer), 1)
    assert layer.packed is None
