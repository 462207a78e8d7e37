"""Checks the Triton attention on a GPU against torch's, then times it in CUDA graphs.

    python scripts/bench_attention.py [check] [sweep] [short] [tree] [long] [prefill]

Without words: everything. Prints a table a section: microseconds a layer, rotation and cache writes
included, and for long contexts the share of the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from eyas import kernels
from eyas.attention.torch_backend import TorchBackend
from eyas.attention.triton_backend import TritonBackend
from eyas.cache.pool import NUM_RESERVED_PAGES, KVPool
from eyas.contract.attention import HeadNorms, KVLayout
from eyas.kernels.triton_attention_plan import TreeConfig
from eyas.kernels.triton_attention_prefill import PrefillConfig
from eyas.kernels.triton_launch import use_pdl

DEVICE, PAGE_SIZE = torch.device("cuda"), 16
WARM_PROCESSES, WARM_PART, NUM_TIMED = 16, None, 0
SHAPES = {"8B": (32, 8, 128), "1B": (32, 8, 64)}  # query heads, key/value heads, head size


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.int32)
    base = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    for step in tl.range(STEPS):
        total += tl.load(x_ptr + base + step * BLOCK + tl.arange(0, BLOCK))
    if tl.sum(total, 0) == 123456789:
        tl.store(out_ptr, 1)


def microseconds(run: Callable[[], Any], *, replays: int = 10) -> float:
    """Median time of one replay of `run`, captured; nan where it asks for too much of the chip."""
    global NUM_TIMED
    NUM_TIMED += 1
    try:
        if WARM_PART is None:
            return _microseconds(run, replays)
        if NUM_TIMED // 4 % WARM_PROCESSES == WARM_PART:
            run()  # compiled, and kept in the cache on disk
        return 1.0
    except triton.runtime.errors.OutOfResources:
        return float("nan")


def _microseconds(run: Callable[[], Any], replays: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays)
    return sorted(times)[len(times) // 2]


def read_bandwidth() -> float:
    """Bytes a second of reading 8 GiB."""
    if WARM_PART is not None:
        return 1e12
    x = torch.randint(0, 9, (1 << 31,), dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    grid = (len(x) // (4096 * 8),)
    time_us = microseconds(lambda: _read_kernel[grid](x, out, BLOCK=4096, STEPS=8), replays=3)
    return x.nbytes / time_us * 1e6


@dataclasses.dataclass
class Case:
    """A filled pool and what a round needs of it."""

    pool: KVPool
    lengths: list[int]
    num_heads: int
    visible_BQN: Tensor
    table_BP: Tensor
    num_layers: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_rows(self) -> int:
        return self.visible_BQN.shape[0] * self.visible_BQN.shape[1]

    def plan(self, backend: Any) -> Any:
        return backend.plan_tree(
            page_table_BP=self.table_BP,
            slots_B=torch.arange(len(self.lengths), device=DEVICE),
            first_index=0,
            end_index_B=torch.tensor(self.lengths, device=DEVICE),
            visible_BQN=self.visible_BQN,
            first_node=0,
            max_kv_len=max(self.lengths),
        )

    def projection(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        layout = self.pool.layout
        width = self.num_heads * layout.head_dim + layout.num_kv_heads * 2 * layout.head_dim
        qkv = torch.randn(self.num_rows, width, device=DEVICE, dtype=self.dtype)
        return qkv, rotary(self.num_rows, layout.head_dim, self.dtype)

    @property
    def num_bytes(self) -> int:
        """What one layer's attention must read of the cache."""
        layout = self.pool.layout
        per_token = layout.num_kv_heads * 2 * layout.head_dim * self.dtype.itemsize
        return sum(self.lengths) * per_token


def rotary(num_rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.rand(num_rows, 1, size // 2, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def chain(num_requests: int, num_rows: int) -> Tensor:
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=DEVICE).tril_()
    return visible.expand(num_requests, -1, -1)


def tree(num_requests: int, num_rows: int) -> Tensor:
    visible = torch.rand(num_requests, num_rows, num_rows, device=DEVICE) > 0.6
    return visible | torch.eye(num_rows, dtype=torch.bool, device=DEVICE)


def make_case(
    shape: tuple[int, int, int],
    lengths: Sequence[int],
    visible_BQN: Tensor,
    *,
    num_layers: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    num_heads, num_kv_heads, size = shape
    num_layers = num_layers if WARM_PART is None else min(num_layers, 2)
    pages_each = -(-(max(lengths) + 65) // PAGE_SIZE)
    counts = [-(-(length + 65) // PAGE_SIZE) for length in lengths]
    pool = KVPool(
        KVLayout(num_layers, num_kv_heads, size, size),
        num_pages=sum(counts) + NUM_RESERVED_PAGES,
        page_size=PAGE_SIZE,
        num_slots=len(lengths) + 1,
        num_scratch_rows=64,
        dtype=dtype,
        device=DEVICE,
    )
    pool.k_LRKD[:, PAGE_SIZE:].normal_()
    pool.v_LRKD[:, PAGE_SIZE:].normal_()
    order = (torch.randperm(sum(counts)) + NUM_RESERVED_PAGES).to(DEVICE).split(counts)
    table_BP = torch.zeros(len(lengths), pages_each, dtype=torch.int64, device=DEVICE)
    for request, pages in enumerate(order):
        table_BP[request, : len(pages)] = pages
    return Case(pool, list(lengths), num_heads, visible_BQN, table_BP, num_layers, dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm; nan where anything is."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def twin(case: Case) -> Case:
    """The same in fp32 for the reference: rounding is then the kernels' alone."""
    layout, pool = case.pool.layout, case.pool
    num_slots = (pool.k_LRKD.shape[1] - pool.num_page_rows) // pool.num_scratch_rows
    wide = KVPool(
        layout,
        num_pages=pool.num_page_rows // PAGE_SIZE,
        page_size=PAGE_SIZE,
        num_slots=num_slots,
        num_scratch_rows=pool.num_scratch_rows,
        dtype=torch.float32,
        device=DEVICE,
    )
    wide.k_LRKD.copy_(pool.k_LRKD)
    wide.v_LRKD.copy_(pool.v_LRKD)
    return dataclasses.replace(case, pool=wide)


def expected_of(
    plan: Any, qkv: Tensor, turn: tuple[Tensor, Tensor], num_heads: int, norms: HeadNorms | None
) -> Tensor:
    layout = plan._pool.layout
    width = layout.num_kv_heads * layout.head_dim
    parts = qkv.float().split([qkv.shape[1] - 2 * width, width, width], 1)
    q, k, v = (x.unflatten(1, (-1, layout.head_dim)) for x in parts)
    cos, sin = (x.float() for x in turn)
    if norms is not None:
        q = kernels.rms_norm(q, norms.q_D.float(), norms.eps)
        k = kernels.rms_norm(k, norms.k_D.float(), norms.eps)
    plan.write(0, kernels.apply_rope(k, cos, sin), v.contiguous())
    return plan.attend(0, kernels.apply_rope(q, cos, sin))


def check_trees() -> None:
    several = [[700], [1, 9000, 0, 33, 64], [130] * 40]
    for shape, dtype, limit, rows in (
        ((32, 8, 128), torch.bfloat16, 1e-2, (1, 4, 32)),
        ((14, 2, 64), torch.bfloat16, 1e-2, (1, 4, 64)),
        ((8, 8, 96), torch.bfloat16, 1e-2, (4,)),
        ((32, 8, 64), torch.float16, 2e-3, (4,)),
        ((32, 8, 128), torch.float32, 2e-6, (4,)),
    ):
        for lengths, num_rows in itertools.product(several, rows):
            for visible in (chain(len(lengths), num_rows), tree(len(lengths), num_rows)):
                check_one(make_case(shape, lengths, visible, num_layers=1, dtype=dtype), limit)
        print(f"check: trees of {shape} in {dtype} right", flush=True)


def check_one(case: Case, limit: float) -> None:
    backend, reference = TritonBackend(case.pool), TorchBackend(twin(case).pool)
    size = case.pool.layout.head_dim
    for step, with_norms in enumerate((False, True, False)):
        qkv, turn = case.projection()
        norms = None
        if with_norms:
            q_D, k_D = torch.randn(2, size, device=DEVICE, dtype=case.dtype).unbind()
            norms = HeadNorms(q_D, k_D, 1e-5)
        options = {"num_heads": case.num_heads, "norms": norms}
        expected = expected_of(case.plan(reference), qkv, turn, case.num_heads, norms)
        plan = case.plan(backend)
        if step == 2:
            actual = plan.attend(0, plan.rotate_and_write(0, qkv, turn, **options))
        else:
            actual = plan.attend_projection(0, qkv, turn, **options)
        found = error(actual, expected)
        heads = (case.num_heads, case.pool.layout.num_kv_heads, size)
        name = f"{heads} {case.lengths[:5]} {tuple(case.visible_BQN.shape)} step {step}"
        # A norm is rounded twice, and its random weights make the scores larger.
        assert found < limit * (4 if with_norms else 1), f"{name}: relative error {found:.1e}"
        counters = backend.workspace.take(0, 1, 0)[2]
        assert not counters.any(), f"{name}: counters are left at {counters.nonzero()}"


def check_replays() -> None:
    """The same graph for other lengths, many times: no counter is left, no result differs."""
    case = make_case(SHAPES["8B"], [5000] * 3, tree(3, 8), num_layers=2)
    backend, (qkv, turn) = TritonBackend(case.pool), case.projection()
    end_B = torch.tensor([5000, 5000, 5000], device=DEVICE)

    def run(used: Any) -> Tensor:
        plan = used.plan_tree(
            page_table_BP=case.table_BP,
            slots_B=torch.arange(3, device=DEVICE),
            first_index=0,
            end_index_B=end_B,
            visible_BQN=case.visible_BQN,
            first_node=0,
            max_kv_len=5000,
        )
        if used is not backend:
            return expected_of(plan, qkv, turn, case.num_heads, None)
        plan.attend_projection(0, qkv, turn, num_heads=case.num_heads)
        return plan.attend_projection(0, qkv, turn, num_heads=case.num_heads)

    run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(backend)
    reference = TorchBackend(twin(case).pool)
    for lengths in ([5000, 1, 700], [0, 0, 0], [64, 4999, 128], [3, 3000, 5000]):
        end_B.copy_(torch.tensor(lengths))
        expected = run(reference)
        graph.replay()
        first = out.clone()
        assert error(first, expected) < 1e-2, lengths
        for _ in range(200):
            graph.replay()
            assert torch.equal(out, first), f"{lengths}: replays differ"
    print("check: one graph serves all lengths; 200 replays of each are equal")


def check_prefill() -> None:
    for shape, dtype in itertools.product([(32, 8, 128), (14, 2, 64)], [torch.bfloat16]):
        chunks = [(0, 700), (512, 530), (3, 4), (1000, 1700)]
        case = make_case(shape, [end for _, end in chunks], chain(4, 1), num_layers=1, dtype=dtype)
        num_rows = sum(end - start for start, end in chunks)
        layout = case.pool.layout
        width = (shape[0] + 2 * shape[1]) * layout.head_dim
        qkv = torch.randn(num_rows, width, device=DEVICE, dtype=dtype)
        turn = rotary(num_rows, layout.head_dim, dtype)
        plans = [
            backend.plan_prefill(page_table_BP=case.table_BP, chunks=chunks, device=DEVICE)
            for backend in (TritonBackend(case.pool), TorchBackend(twin(case).pool))
        ]
        expected = expected_of(plans[1], qkv, turn, shape[0], None)
        q = plans[0].rotate_and_write(0, qkv, turn, num_heads=shape[0])
        found = error(plans[0].attend(0, q), expected)
        assert found < 1e-2, f"prefill {shape}: {found:.1e}"
        print(f"check: prefill {shape} right ({found:.1e})")


def time_tree(case: Case, config: TreeConfig, *, pdl: bool = False, replays: int = 10) -> float:
    """Microseconds a layer, the plan shared by all."""
    use_pdl(pdl)
    backend, (qkv, turn) = TritonBackend(case.pool, config=config), case.projection()
    end_B = torch.tensor(case.lengths, device=DEVICE)
    slots_B = torch.arange(len(case.lengths), device=DEVICE)

    def run() -> None:
        plan = backend.plan_tree(
            page_table_BP=case.table_BP,
            slots_B=slots_B,
            first_index=0,
            end_index_B=end_B,
            visible_BQN=case.visible_BQN,
            first_node=0,
            max_kv_len=0,
        )
        for layer in range(case.num_layers):
            plan.attend_projection(layer, qkv, turn, num_heads=case.num_heads)

    time_us = microseconds(run, replays=replays) / case.num_layers
    use_pdl(None)
    return time_us


def time_parts() -> None:
    """What launches cost by themselves: the plan; rotation apart from attention."""
    case = make_case(SHAPES["8B"], [768], chain(1, 4), num_layers=32)
    backend, (qkv, turn) = TritonBackend(case.pool), case.projection()

    def plans() -> None:
        for _ in range(case.num_layers):
            case_plan = backend.plan_tree(
                page_table_BP=case.table_BP,
                slots_B=slots_B,
                first_index=0,
                end_index_B=end_B,
                visible_BQN=case.visible_BQN,
                first_node=0,
                max_kv_len=0,
            )
            case_plan._planned(4)

    slots_B, end_B = torch.arange(1, device=DEVICE), torch.tensor([768], device=DEVICE)
    plan = case.plan(backend)
    q = plan.rotate_and_write(0, qkv, turn, num_heads=32)

    def rotations() -> None:
        for layer in range(case.num_layers):
            plan.rotate_and_write(layer, qkv, turn, num_heads=32)

    def attentions() -> None:
        for layer in range(case.num_layers):
            plan.attend(layer, q)

    use_pdl(False)
    for name, run in (("plan", plans), ("rotate+write", rotations), ("attend alone", attentions)):
        print(f"parts: {name} {microseconds(run) / case.num_layers:.2f} us")
    use_pdl(None)


def show(title: str, names: Sequence[str], rows: dict[str, list[str]]) -> None:
    """A table: a row a configuration, a column a case."""
    print(f"\n{title}")
    width = max(len(name) for name in rows) + 1
    print(" " * width + "".join(f"{name:>16}" for name in names))
    for name, cells in rows.items():
        print(f"{name:<{width}}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def label(config: TreeConfig) -> str:
    return (
        f"n{config.block_n} w{config.num_warps} s{config.num_stages} "
        f"waves{config.waves} min{config.min_blocks} {config.combine}"
        f"{'' if config.prefetch else ' cold'}"
    )


SHORT = [
    TreeConfig(block_n=n, num_warps=w, num_stages=s, min_blocks=m)
    for n, w, s, m in [
        (32, 4, 4, 2), (32, 4, 4, 4), (64, 4, 3, 1), (64, 4, 4, 1), (64, 4, 4, 2), (64, 4, 4, 3),
        (64, 4, 4, 4), (64, 4, 4, 100), (64, 2, 4, 2), (64, 8, 4, 2), (128, 4, 3, 1),
        (128, 8, 3, 1), (128, 8, 3, 2),
    ]
]  # fmt: skip


def short_section() -> None:
    time_parts()
    for shape, num_rows in itertools.product(SHAPES, (1, 4)):
        cases = {
            f"b{batch}": make_case(
                SHAPES[shape], [768] * batch, chain(batch, num_rows), num_layers=16
            )
            for batch in (1, 4, 16, 64)
        }
        rows = {
            label(config): [f"{time_tree(case, config):.2f}" for case in cases.values()]
            for config in (SHORT if shape == "8B" else SHORT[3:9])
        }
        config = TreeConfig(num_stages=4)
        rows["pdl " + label(config)] = [
            f"{time_tree(case, config, pdl=True):.2f}" for case in cases.values()
        ]
        floors = [case.num_bytes / BANDWIDTH * 1e6 for case in cases.values()]
        rows["floor"] = [f"{floor:.2f}" for floor in floors]
        show(f"{shape}, ctx 768, Q={num_rows}: us a layer", list(cases), rows)


def sweep_kernels(num_rows: int) -> list[TreeConfig]:
    """Kernels that are compiled apart; how the work is cut costs no compilation."""
    sizes = [(32, 4, 4), (32, 4, 3), (64, 4, 3), (64, 4, 4), (128, 4, 2)]
    sizes += [(32, 2, 4), (64, 2, 3)] if num_rows <= 4 else [(64, 8, 3)]
    found = [
        TreeConfig(block_n=n, num_warps=w, num_stages=s, combine=combine)
        for combine in ("last", "apart")
        for n, w, s in sizes
    ]
    return [*found, TreeConfig(block_n=32, num_stages=4, prefetch=False)]


def sweep_case(shape: str, num_rows: int, batch: int) -> Case:
    """More layers at batch 1: no cache line is still near when its layer comes again."""
    visible = chain(batch, num_rows) if num_rows <= 4 else tree(batch, num_rows)
    num_layers = 24 if batch == 1 else 8
    return make_case(SHAPES[shape], [768] * batch, visible, num_layers=num_layers)


def right_kernels(shape: str, num_rows: int) -> list[TreeConfig]:
    """Those of the sweep that give the reference's result for uneven lengths, twice."""
    lengths = [1, 900, 0, 2900]
    case = make_case(SHAPES[shape], lengths, tree(len(lengths), num_rows), num_layers=1)
    qkv, turn = case.projection()
    reference = case.plan(TorchBackend(twin(case).pool))
    expected = expected_of(reference, qkv, turn, case.num_heads, None)
    kept = []
    for config in sweep_kernels(num_rows):
        use_pdl(True)
        try:
            plan = case.plan(TritonBackend(case.pool, config=config))
            for _ in range(2):
                found = error(
                    plan.attend_projection(0, qkv, turn, num_heads=case.num_heads), expected
                )
                assert found < 1e-2, f"{shape} Q={num_rows} {label(config)}: error {found:.1e}"
            kept.append(config)
        except triton.runtime.errors.OutOfResources:
            print(f"{shape} Q={num_rows} {label(config)}: asks for too much", flush=True)
        except AssertionError as wrong:
            print(f"WRONG: {wrong}", flush=True)
    use_pdl(None)
    return kept


def sweep_section() -> None:
    """The best settings by shape, rows and batch; all of them in $OUT/attention_sweep.json."""
    if WARM_PART is not None:
        warm_sweep()
        return
    found: dict[str, dict[str, float]] = {}
    for shape, num_rows in itertools.product(SHAPES, (1, 4, 32)):
        kernels_kept = right_kernels(shape, num_rows)
        for batch in (1, 4, 16, 64):
            case = sweep_case(shape, num_rows, batch)
            default = TritonBackend(case.pool).config
            plain = time_tree(case, default, replays=4)
            usual = time_tree(case, default, pdl=True, replays=4)
            cell = {}
            for config, waves in itertools.product(kernels_kept, (1, 2, 4)):
                used = dataclasses.replace(config, waves=waves)
                cell[label(used)] = time_tree(case, used, pdl=True, replays=4)
            best = sorted(cell, key=lambda name: (cell[name] != cell[name], cell[name]))
            name = f"{shape} Q{num_rows} b{batch}"
            found[name] = cell
            floor = case.num_bytes / BANDWIDTH * 1e6
            print(
                f"{name:<11} floor {floor:5.1f} default {usual:6.2f} (no PDL {plain:6.2f}) best "
                + "; ".join(f"{cell[b]:.2f} {b}" for b in best[:3]),
                flush=True,
            )
    keep_sweep(found)
    sweep_long()


def warm_sweep() -> None:
    """Compile this process's share."""
    jobs = [
        (shape, num_rows, config, pdl)
        for shape, num_rows in itertools.product(SHAPES, (1, 4, 32))
        for config, pdl in [
            *((config, True) for config in sweep_kernels(num_rows)),
            (None, False),
        ]
    ]
    for shape, num_rows, config, pdl in jobs[WARM_PART::WARM_PROCESSES]:
        use_pdl(pdl)
        for batch in (1, 4, 16, 64) if config and config.combine == "apart" else (1, 16):
            case = sweep_case(shape, num_rows, batch)
            backend, (qkv, turn) = TritonBackend(case.pool, config=config), case.projection()
            plan = case.plan(backend)
            try:
                for _ in range(2):
                    plan.attend_projection(0, qkv, turn, num_heads=case.num_heads)
            except triton.runtime.errors.OutOfResources:
                break


def keep_sweep(found: dict[str, dict[str, float]]) -> None:
    folder = os.environ.get("OUT")
    if folder:
        (Path(folder) / "attention_sweep.json").write_text(json.dumps(found, indent=1))


def sweep_long() -> None:
    for lengths, num_rows in itertools.product(([32768] * 4, [131072] + [512] * 31), (1, 4)):
        visible = chain(len(lengths), num_rows)
        case = make_case(SHAPES["8B"], lengths, visible, num_layers=4)
        cell = {}
        for n, s in ((32, 4), (64, 3), (64, 4)):
            for waves in (1, 2, 3, 4, 8):
                config = TreeConfig(block_n=n, num_stages=s, waves=waves)
                time_us = time_tree(case, config, pdl=True, replays=2)
                cell[label(config)] = case.num_bytes / time_us * 1e6 / BANDWIDTH
        best = sorted(cell, key=lambda name: -cell[name])
        name = f"{len(lengths)} requests, the first {lengths[0] // 1024}k, Q{num_rows}"
        shares = "; ".join(f"{cell[b]:.0%} {b}" for b in best[:4])
        print(f"{name}: of the read bandwidth {shares}; worst {cell[best[-1]]:.0%} {best[-1]}")


def tree_section() -> None:
    cases = {
        f"{shape} Q{num_rows}": make_case(SHAPES[shape], [768], tree(1, num_rows), num_layers=32)
        for shape, num_rows in (("8B", 8), ("8B", 32), ("8B", 64), ("1B", 32))
    }
    configs = [
        TreeConfig(block_n=n, num_warps=w, num_stages=s, min_blocks=m)
        for n, w, s, m in [
            (32, 4, 4, 2), (64, 4, 3, 1), (64, 4, 3, 2), (64, 4, 4, 1), (64, 4, 4, 2),
            (64, 4, 4, 4), (64, 8, 4, 2), (128, 8, 3, 1),
        ]
    ]  # fmt: skip
    rows = {
        label(config): [f"{time_tree(case, config):.2f}" for case in cases.values()]
        for config in configs
    }
    show("batch 1, ctx 768, trees: us a layer", list(cases), rows)


LONG = [
    TreeConfig(block_n=n, num_warps=w, num_stages=s, waves=waves)
    for n, w, s, waves in [
        (64, 4, 3, 8), (64, 4, 4, 8), (64, 4, 5, 8), (64, 4, 4, 2), (64, 4, 4, 4), (64, 4, 4, 16),
        (64, 2, 4, 8), (64, 8, 4, 8), (128, 4, 3, 8), (128, 4, 4, 8), (128, 8, 4, 8),
        (32, 4, 5, 8), (32, 2, 6, 8),
    ]
]  # fmt: skip


def long_section() -> None:
    shapes = [
        ("8B", [32768] * 4, 1), ("8B", [32768] * 4, 4), ("8B", [131072] + [512] * 31, 1),
        ("8B", [131072] + [512] * 31, 4), ("1B", [32768] * 4, 4),
    ]  # fmt: skip
    cells: dict[str, list[str]] = {label(config): [] for config in LONG}
    names = []
    for shape, lengths, num_rows in shapes:
        visible = chain(len(lengths), num_rows)
        case = make_case(SHAPES[shape], lengths, visible, num_layers=4)
        names.append(f"{shape} {len(lengths)}x{lengths[0] // 1024}k Q{num_rows}")
        for config in LONG:
            time_us = time_tree(case, config)
            share = case.num_bytes / time_us * 1e6 / BANDWIDTH
            cells[label(config)].append(f"{time_us:.0f} ({share:.0%})")
        del case
    show("long contexts: us a layer (share of the read bandwidth)", names, cells)


PREFILL = [
    PrefillConfig(block_m=m, block_n=n, num_warps=w, num_stages=s)
    for m, n, w, s in [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (64, 64, 4, 3),
        (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 32, 8, 4),
    ]
]  # fmt: skip


def prefill_section() -> None:
    cases = {
        "512": [(0, 512)], "16x512": [(0, 512)] * 16, "4096": [(0, 4096)],
        "512 at 30k": [(30000, 30512)], "8192": [(0, 8192)],
    }  # fmt: skip
    for shape in SHAPES.values():
        num_heads, _, size = shape
        rows: dict[str, list[str]] = {
            f"m{c.block_m} n{c.block_n} w{c.num_warps} s{c.num_stages}": [] for c in PREFILL
        }
        rows["torch causal"] = []
        for chunks in cases.values():
            case = make_case(shape, [end for _, end in chunks], chain(len(chunks), 1), num_layers=1)
            num_rows = sum(end - start for start, end in chunks)
            q = torch.randn(num_rows, num_heads, size, device=DEVICE, dtype=torch.bfloat16)
            pairs = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in chunks)
            flops = 4 * pairs * num_heads * size
            for config, cells in zip(PREFILL, rows.values(), strict=False):
                backend = TritonBackend(case.pool, prefill_config=config)
                plan = backend.plan_prefill(
                    page_table_BP=case.table_BP, chunks=chunks, device=DEVICE
                )
                time_us = microseconds(lambda plan=plan, q=q: plan.attend(0, q))
                cells.append(f"{time_us:.0f} ({flops / time_us / 1e6:.0f}T)")
            rows["torch causal"].append(dense_causal(chunks, shape, flops))
        show(f"prefill {shape}: us (TFLOP/s)", list(cases), rows)


def dense_causal(chunks: list[tuple[int, int]], shape: tuple[int, int, int], flops: int) -> str:
    """torch's fused attention on dense tensors, where it can do the same."""
    start, end = chunks[0]
    if start:
        return "-"
    num_heads, num_kv_heads, size = shape
    q, k, v = (
        torch.randn(len(chunks), heads, end, size, device=DEVICE, dtype=torch.bfloat16)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    time_us = microseconds(lambda: attend(q, k, v, is_causal=True, enable_gqa=True))
    return f"{time_us:.0f} ({flops / time_us / 1e6:.0f}T)"


def check_section() -> None:
    check_replays()
    check_prefill()
    check_trees()


SECTIONS = {
    "check": check_section,
    "sweep": sweep_section,
    "short": short_section,
    "tree": tree_section,
    "long": long_section,
    "prefill": prefill_section,
}


def compile_first(sections: list[str]) -> None:
    """Kernels of all settings are compiled by several processes, before any is timed."""
    command = [sys.executable, __file__, *sections, "--part"]
    quiet = {"stdout": subprocess.DEVNULL}
    children = [subprocess.Popen([*command, str(i)], **quiet) for i in range(WARM_PROCESSES)]
    for child in children:
        child.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []])
    parser.add_argument("--part", type=int)
    given = parser.parse_args()
    chosen, WARM_PART = given.sections or list(SECTIONS), given.part
    timed = [section for section in chosen if section != "check"]
    if WARM_PART is None and timed:
        start = time.perf_counter()
        compile_first(timed)
        print(f"[compiled: {time.perf_counter() - start:.0f} s]", flush=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        BANDWIDTH = read_bandwidth()
        print(f"{torch.cuda.get_device_name()}: read bandwidth {BANDWIDTH / 1e12:.2f} TB/s")
        for section in chosen:
            start = time.perf_counter()
            SECTIONS[section]()
            print(f"[{section}: {time.perf_counter() - start:.0f} s]\n", flush=True)
