"""The memory plan against a worker that runs at its limits: parts exact, the peak within 5 %."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import DraftShape, TargetShape, write_draft, write_target
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from eyas.config import EngineConfig
from eyas.engine import load
from eyas.engine.memory_plan import MemoryPlan
from eyas.engine.worker import Worker
from eyas.kernels import SamplingMode, native_attention
from eyas.speculative.round import PrefillChunk
from eyas.speculative.state import SlotSettings, sampling_mode
from eyas.types import SamplingParams

EVERY_OPTION = SamplingParams(
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=1.0,
    frequency_penalty=1.0,
    repetition_penalty=1.1,
    logit_bias={1: 1.0},
    min_tokens=3,
    logprobs=5,
)
# Each is dominated by something else: (settings, target, draft). Attention is left to torch, as it
# is at the limits of any real model: the kernels for few rows gather nothing and need less.
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 7}
HEADS = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "sampling": (
        {"max_batch_size": 8, "max_model_len": 64, "topk": 4, "num_tree_nodes": 24},
        {"vocab_size": 8192},
        {"vocab_size": 8192, "draft_vocab_size": 1024},
    ),
    "drafting": (
        {"max_batch_size": 8, "max_model_len": 64, "topk": 8, "num_tree_nodes": 4},
        {"vocab_size": 4096},
        {"vocab_size": 4096, "draft_vocab_size": 4096, "has_map": False},
    ),
    "drafting, in another dtype": (
        {"max_batch_size": 8, "max_model_len": 64, "topk": 8, "num_tree_nodes": 4}
        | {"draft_dtype": "float32"},
        {"vocab_size": 4096},
        {"vocab_size": 4096, "draft_vocab_size": 4096, "has_map": False},
    ),
    "prompt chunk": (
        {"max_batch_size": 2, "max_model_len": 512, "prefill_chunk_tokens": 512},
        WIDE,
        {"hidden_size": 128, "target_hidden_size": 128, "fc_norm": True},
    ),
    "prompt chunk, plain": (
        {"max_batch_size": 2, "max_model_len": 512, "prefill_chunk_tokens": 384},
        WIDE,
        None,
    ),
    "verify": (
        {"max_batch_size": 8, "max_model_len": 512, "prefill_chunk_tokens": 16},
        HEADS | {"num_layers": 2},
        None,
    ),
    "extend": (
        {"max_batch_size": 8, "max_model_len": 512, "prefill_chunk_tokens": 16},
        {},
        HEADS,
    ),
}


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Where half precision is computed in fp32 the temporary tensors are larger."""
    name: str = request.param
    return name


def load_case(
    name: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Worker, MemoryPlan]:
    """A worker as the engine builds it, and its plan."""
    # Whether weights are packed is timed; what that takes is part of the plan all the same.
    monkeypatch.setattr(load, "choose_layouts", lambda *_: None)
    settings, target, draft = CASES[name]
    write_target(folder / "target", TargetShape(**target))
    if draft is not None:
        settings = settings | {"draft": str(folder / "draft")}
        write_draft(folder / "draft", DraftShape(**draft))
    config = EngineConfig(model=str(folder / "target"), device="cpu", dtype=dtype, **settings)  # type: ignore[arg-type]
    loaded = load.load_engine(config)
    assert loaded.report.plan is not None
    return loaded.engine.worker, loaded.report.plan


def num_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of tensors, each storage once; other objects are passed over."""
    storages = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, Tensor) and t.nbytes}
    return sum(storages.values())


def resident_bytes(worker: Worker) -> dict[str, int]:
    """What a worker holds while nothing runs, by the plan's names."""
    target, proposer = worker.runner.target, worker.proposer
    assert isinstance(target, torch.nn.Module)
    pools = [pool for pool in (worker.target_pool, worker.draft_pool) if pool is not None]
    whole = sum(pool.num_bytes for pool in pools)
    kv = sum(
        t[:, : pool.num_page_rows].nbytes for pool in pools for t in (pool.k_LRKD, pool.v_LRKD)
    )
    rotary: list[Any] = [target.rotary.cos_P1D, target.rotary.sin_P1D]
    weights = list(target.parameters())
    draft_weights: list[Tensor] = []
    if proposer is not None:
        draft: Any = proposer.draft
        shared = {p.data_ptr() for p in weights}
        own = [*draft.parameters(), *draft.buffers()]
        draft_weights = [p for p in own if p.data_ptr() not in shared]
        rotary += [draft.rotary.cos_P1D, draft.rotary.sin_P1D, draft.target_ids_V]
    return {
        "target_weight_bytes": num_bytes(weights),
        "draft_weight_bytes": num_bytes(draft_weights),
        "packed_bytes": 0,
        "kv_bytes": kv,
        "page_end_bytes": 0 if proposer is None else proposer.page_end_PH.nbytes,
        "scratch_bytes": whole - kv,
        "slot_bytes": num_bytes(vars(worker.state).values()),
        "table_bytes": num_bytes(rotary),
    }


def allocated_peak(function: Callable[[], object]) -> int:
    """Bytes that the allocator had handed out at the worst moment of a call, above its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def admit_all(worker: Worker) -> SamplingMode:
    """A full batch of requests of the full length, every option on."""
    shape = worker.shape
    per_request = -(-shape.max_model_len // shape.page_size)
    for slot in range(shape.num_slots):
        settings = SlotSettings(EVERY_OPTION, 10**6, slot, [3], prompt_token_ids=[1, 2])
        first = 2 + slot * per_request
        worker.admit(slot, settings, pages=range(first, first + per_request), num_cached=0)
    return sampling_mode(EVERY_OPTION)


def run_to_the_limits(worker: Worker, chunk_tokens: int) -> int:
    """The largest peak of: one prompt's last chunk, every prompt's last token, a round."""
    shape, mode = worker.shape, admit_all(worker)
    length, slots = shape.max_model_len, range(shape.num_slots)
    chunk = min(chunk_tokens, length)
    one = [PrefillChunk(0, length - chunk, [1] * chunk, None)]
    many = [PrefillChunk(slot, length - 1, [1], None) for slot in slots]

    def prefill(chunks: list[PrefillChunk]) -> int:
        return allocated_peak(lambda: worker.prefill(chunks, mode=mode, tree=shape.tree).read())

    peaks = [prefill(one), prefill(many)]
    worker.state.length_S[:-1] = length - shape.tree.depth - 1
    worker.state.active_S[:-1] = True
    # A round that was launched before the last one was read counts its tokens as there.
    longest = length + shape.tree.depth + 1
    peaks.append(
        allocated_peak(
            lambda: worker.round(slots, max_kv_len=longest, mode=mode, tree=shape.tree).read()
        )
    )
    return max(peaks)


@pytest.mark.parametrize("name", list(CASES))
def test_parts_are_what_a_worker_holds(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, plan = load_case(name, dtype, tmp_path, monkeypatch)
    for part, size in resident_bytes(worker).items():
        assert getattr(plan, part) == size, part


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch's attention keeps a block of scores a thread: much beside these tiny models, nothing
    beside a real one, and left to the plan's headroom."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", list(CASES))
def test_the_peak_is_within_five_percent_of_the_plan(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_attention, "max_attention_work", lambda: 0)
    worker, plan = load_case(name, dtype, tmp_path, monkeypatch)
    chunk_tokens = CASES[name][0].get("prefill_chunk_tokens", 512)
    peak = sum(resident_bytes(worker).values()) + run_to_the_limits(worker, chunk_tokens)
    assert 0.95 * plan.total_bytes <= peak <= 1.02 * plan.total_bytes
