"""The choice of how linears run few rows on a GPU: what is timed, kept and passed over."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.kernels.linear_config import Form, LinearConfig
from eyas.models import linear_plan
from eyas.models.linear import Linear
from eyas.models.linear_plan import Work, choose, optimize_for_gpu, read_choices, write_choices
from eyas.models.residual import use_as

SIZE = 2048
CONFIG = LinearConfig("vector", 1, block_out=2, block_in=256, num_warps=1)


def layer(form: Form = "plain", *, seed: int = 0) -> Linear:
    linear = Linear(SIZE, SIZE, dtype=torch.bfloat16, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    linear.weight.data.copy_(torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5)
    use_as(linear, form)
    return linear


def work(form: Form = "plain") -> Work:
    return Work(form, SIZE, SIZE, False, torch.bfloat16)


class Fake:
    """Stands for the kernels: computes in torch, and takes as long as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: LinearConfig | None = None
        self.seconds: dict[LinearConfig | None, float] = {}
        self.wrong: set[LinearConfig] = set()
        self.failing: set[LinearConfig] = set()
        monkeypatch.setattr(kernels, "few_row_linear", self.run)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        config: LinearConfig,
        norm: tuple[Tensor, float] | None,
        residual_TO: Tensor | None,
        is_gated: bool,
    ) -> Tensor:
        if config in self.failing:
            raise RuntimeError("out of resource: shared memory")
        self.last = config
        x = x if norm is None else kernels.rms_norm(x, *norm)
        y = nn.functional.linear(x, weight, bias)
        y = kernels.silu_mul(y) if is_gated else y
        y = y if residual_TO is None else y + residual_TO
        return y * (1.5 if config in self.wrong else 1.0)

    def timer(self, calls: Sequence[Callable[[], Tensor]]) -> float:
        self.last = None
        for call in calls:
            call()
        return self.seconds.get(self.last, 5.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


@pytest.mark.parametrize("form", ["plain", "norm", "add", "gated"])
def test_the_fastest_wins(fake: Fake, form: Form) -> None:
    candidates = work(form).candidates(4)
    fake.seconds = {None: 2.0, candidates[0]: 1.5, candidates[1]: 1.0, candidates[2]: 1.2}
    assert choose(work(form), [layer(form)], 4, timer=fake.timer) == candidates[1]


def test_the_plain_way_stays_unless_another_is_clearly_faster(fake: Fake) -> None:
    fake.seconds = {None: 1.0, work().candidates(1)[0]: 0.99}
    assert choose(work(), [layer()], 1, timer=fake.timer) is None


def test_what_fails_or_computes_something_else_is_passed_over(fake: Fake) -> None:
    wrong, failing, slower = work().candidates(1)[:3]
    fake.wrong, fake.failing = {wrong}, {failing}
    fake.seconds = {None: 2.0, wrong: 0.1, failing: 0.1, slower: 1.0}
    assert choose(work(), [layer()], 1, timer=fake.timer) == slower


def test_all_weights_of_a_model_take_turns(fake: Fake) -> None:
    seen: list[int] = []

    def timer(calls: Sequence[Callable[[], Tensor]]) -> float:
        seen.append(len(calls))
        return fake.timer(calls)

    choose(work(), [layer(seed=seed) for seed in range(3)], 1, timer=timer)
    assert set(seen) == {3}


def test_a_shared_weight_counts_once(fake: Fake) -> None:
    first, second = layer(), layer()
    second.weight = first.weight
    assert len(linear_plan._sample([first, second])) == 1


def test_choices_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "linears" / "device.json"
    assert read_choices(path) == {}
    write_choices(path, {work().key(1): CONFIG, work().key(4): None})
    assert read_choices(path) == {work().key(1): CONFIG, work().key(4): None}
    write_choices(path, {work("add").key(1): None})  # another process's
    assert set(read_choices(path)) == {work().key(1), work().key(4), work("add").key(1)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1]", '{"a": 1}', '{"a": {"kind": "vector"}}', '{"a": {"speed": 3}}']
)
def test_a_spoilt_file_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    assert read_choices(path) == {}
    write_choices(path, {"b": CONFIG})
    assert read_choices(path) == {"b": CONFIG}
    assert json.loads(path.read_text())["b"]["block_in"] == 256


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_choices(tmp_path / "file" / "device.json", {"a": CONFIG})


def test_keys_name_all_that_matters() -> None:
    works = [
        work(),
        work("add"),
        Work("plain", SIZE, 2 * SIZE, False, torch.bfloat16),
        Work("plain", 2 * SIZE, SIZE, False, torch.bfloat16),
        Work("plain", SIZE, SIZE, True, torch.bfloat16),
        Work("plain", SIZE, SIZE, False, torch.float16),
    ]
    assert len({w.key(rows) for w in works for rows in (1, 4)}) == 2 * len(works)


def test_a_cpu_has_no_plan() -> None:
    model = nn.Sequential(layer())
    assert optimize_for_gpu([model], 64) == {}
    assert model[0].plan is None
