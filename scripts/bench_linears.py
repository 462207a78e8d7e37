"""Checks the few-row linears on a GPU, then times every candidate and a whole stack of blocks.

    python scripts/bench_linears.py [--models 8B,1B] [--rows 1,4,16,64,256] [--narrow] [--json FILE]

For each linear of a model of this shape: the library and every configuration, in graphs over
weights that rotate through several L2 caches; then all blocks of the model without attention,
five kernels each, with the best configurations and with and without dependent launch. The table at
the end has microseconds, bytes a second, and their share of the read bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from eyas import kernels
from eyas.bench.bandwidth import ReadBandwidth
from eyas.comm.group import ALONE
from eyas.kernels.linear_config import Form, LinearConfig, LinearPlan, search_space
from eyas.kernels.triton_launch import launch_options, use_pdl
from eyas.models.layers import RMSNorm
from eyas.models.linear import Linear
from eyas.models.linear_plan import Operands, Work, compile_ahead, time_in_graph
from eyas.models.residual import Stream, linear_add, norm_gated, norm_linear

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
ROTATED_BYTES = 300 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's widths: hidden, fused qkv, query, intermediate."""

    num_layers: int
    hidden: int
    qkv: int
    query: int
    inner: int
    vocab: int = 128256

    def works(self) -> dict[str, Work]:
        """The linears of the target and of its draft."""

        def work(form: Form, num_out: int, num_in: int) -> Work:
            return Work(form, num_out, num_in, False, DTYPE)

        return {
            "qkv": work("norm", self.qkv, self.hidden),
            "o": work("add", self.hidden, self.query),
            "gate_up": work("gated", 2 * self.inner, self.hidden),
            "down": work("add", self.hidden, self.inner),
            "head": work("plain", self.vocab, self.hidden),
            "draft qkv": work("plain", self.qkv, 2 * self.hidden),
            "draft kv": work("plain", self.qkv - self.query, 2 * self.hidden),
            "draft fc": work("plain", self.hidden, 3 * self.hidden),
            "draft head": work("norm", 32000, self.hidden),
        }


MODELS = {
    "8B": Shape(32, 4096, 6144, 4096, 14336),
    "1B": Shape(16, 2048, 3072, 2048, 8192),
}


@dataclasses.dataclass(frozen=True)
class Timed:
    """One candidate's microseconds a call. config None: the library and the small kernels."""

    config: LinearConfig | None
    microseconds: float
    error: float = 0.0

    def __str__(self) -> str:
        c = self.config
        if c is None:
            return f"{self.microseconds:8.2f} library"
        flags = ("W" if c.weights_first else "") + ("n" if c.norm_apart else "")
        sizes = f"{c.block_out}x{c.block_in} w{c.num_warps} s{c.num_stages}"
        return f"{self.microseconds:8.2f} {c.kind[0]} {sizes} {flags} (error {self.error:.1e})"


Results = dict[tuple[str, int], list[Timed]]


def fastest(timed: Sequence[Timed]) -> Timed:
    return min(timed, key=lambda t: t.microseconds)


def weights(work: Work) -> list[Tensor]:
    size = work.num_out * work.num_in * DTYPE.itemsize
    count = max(-(-ROTATED_BYTES // size), 1)
    std = work.num_in**-0.5
    return [
        torch.randn(work.num_out, work.num_in, device=DEVICE, dtype=DTYPE).mul_(std)
        for _ in range(count)
    ]


def candidates(work: Work, rows: int, narrow: bool) -> list[LinearConfig]:
    space = search_space(work.form, rows=rows, wide=not narrow)
    return [c for c in space if c.fits(work.form, num_out=work.num_out, num_in=work.num_in)]


def time_linear(work: Work, rows: int, *, narrow: bool, sample: list[Tensor]) -> list[Timed]:
    """The library first, then all candidates that run, fastest first."""
    operands = Operands.of(work, rows, DEVICE)
    expected = operands.run_plain(work.form, sample[0], None).float()

    def microseconds(config: LinearConfig | None) -> float:
        calls = [partial(operands.run, work.form, w, None, config) for w in sample]
        return time_in_graph(calls) * 1e6 / len(calls)

    found = []
    for config in candidates(work, rows, narrow):
        try:
            y = operands.run(work.form, sample[0], None, config).float()
            error = ((y - expected).norm() / expected.norm()).item()
            found.append(Timed(config, microseconds(config), error))
        except Exception as problem:  # many kinds; shown, as a whole run must not stop for one
            print(f"  {work.key(rows)} {config}: {type(problem).__name__} {str(problem)[:80]}")
    wrong = [t for t in found if not t.error < 0.02]
    for timed in wrong:
        print(f"  WRONG {work.key(rows)} {timed}")
    right = sorted((t for t in found if t.error < 0.02), key=lambda t: t.microseconds)
    return [Timed(None, microseconds(None)), *right]


class Block:
    """A block's five kernels, attention left out."""

    def __init__(self, shape: Shape) -> None:
        self.norms = [RMSNorm(shape.hidden, 1e-5, dtype=DTYPE, device=DEVICE) for _ in range(2)]
        for norm in self.norms:
            norm.weight.data.fill_(1.0)
        self.linears = {}
        for name in ("qkv", "o", "gate_up", "down"):
            work = shape.works()[name]
            linear = Linear(work.num_in, work.num_out, dtype=DTYPE, device=DEVICE)
            linear.weight.data.normal_(std=0.5 * work.num_in**-0.5)
            self.linears[name] = linear

    def __call__(self, stream: Stream, attended: Tensor) -> Stream:
        hidden, _ = norm_linear(self.norms[0], self.linears["qkv"], stream)
        stream = linear_add(self.linears["o"], attended, hidden, group=ALONE)
        hidden, inner = norm_gated(self.norms[1], self.linears["gate_up"], stream)
        return linear_add(self.linears["down"], inner, hidden, group=ALONE)

    def linears_alone(self, x: Tensor, attended: Tensor, inner: Tensor) -> Tensor:
        inputs = {"qkv": x, "o": attended, "gate_up": x, "down": inner}
        return [F.linear(inputs[n], linear.weight) for n, linear in self.linears.items()][-1]


class Stack:
    """All blocks of a model, its last norm and its head, with the plans that won."""

    def __init__(self, shape: Shape, results: Results) -> None:
        self.shape, works = shape, shape.works()
        self.plans: dict[str, LinearPlan] = {
            name: LinearPlan(
                {
                    (work.form, rows): fastest(timed).config
                    for (linear, rows), timed in results.items()
                    if linear == name
                }
            )
            for name, work in works.items()
        }
        self.blocks = [Block(shape) for _ in range(shape.num_layers)]
        self.norm = RMSNorm(shape.hidden, 1e-5, dtype=DTYPE, device=DEVICE)
        self.norm.weight.data.fill_(1.0)
        self.head = Linear(shape.hidden, shape.vocab, dtype=DTYPE, device=DEVICE)
        self.head.weight.data.normal_(std=shape.hidden**-0.5)

    def forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        stream = Stream(hidden)
        for block in self.blocks:
            stream = block(stream, attended)
        logits: Tensor = self.head(self.norm.enter(stream)[1])
        return logits

    def linears_alone(self, hidden: Tensor, attended: Tensor) -> Tensor:
        inner = hidden.new_zeros(len(hidden), self.shape.inner)
        for block in self.blocks:
            block.linears_alone(hidden, attended, inner)
        return F.linear(hidden, self.head.weight)

    def milliseconds(self, run: Callable[[], Tensor], *, planned: bool, pdl: bool | None) -> float:
        for block in self.blocks:
            for name, linear in block.linears.items():
                linear.plan = self.plans[name] if planned else None
        self.head.plan = self.plans["head"] if planned else None
        use_pdl(pdl)
        try:
            return time_in_graph([run]) * 1e3
        finally:
            use_pdl(None)

    def line(self, num_rows: int) -> str:
        """Times for a number of rows: the library's linears alone, then the blocks."""
        hidden = torch.randn(num_rows, self.shape.hidden, device=DEVICE, dtype=DTYPE)
        attended = torch.randn(num_rows, self.shape.query, device=DEVICE, dtype=DTYPE)
        alone, forward = (
            partial(run, hidden, attended) for run in (self.linears_alone, self.forward)
        )
        times = [self.milliseconds(alone, planned=False, pdl=False)]
        for planned in (False, True):
            for pdl in (False, None):
                times.append(self.milliseconds(forward, planned=planned, pdl=pdl))
        return f"{num_rows:5d} " + " ".join(f"{t:9.3f}" for t in times)


def time_pieces(shape: Shape) -> list[str]:
    """The small kernels by themselves, back to back: microseconds each."""
    lines = []
    for num_rows in (1, 4, 16, 64, 256):
        x, delta = (torch.randn(num_rows, shape.hidden, device=DEVICE, dtype=DTYPE) for _ in "ab")
        weight = torch.ones(shape.hidden, device=DEVICE, dtype=DTYPE)
        gate_up = torch.randn(num_rows, 2 * shape.inner, device=DEVICE, dtype=DTYPE)
        runs = {
            "norm": lambda x=x, w=weight: kernels.rms_norm(x, w, 1e-5),
            "add+norm": lambda x=x, d=delta, w=weight: kernels.add_rms_norm(x, d, w, 1e-5)[1],
            "silu": lambda g=gate_up: kernels.silu_mul(g),
        }
        cells = [
            f"{name} {time_in_graph([run] * 50) * 1e6 / 50:5.2f}" for name, run in runs.items()
        ]
        lines.append(f"{num_rows:5d} rows: " + "  ".join(cells))
    return lines


def run_model(name: str, shape: Shape, args: argparse.Namespace, read_rate: float) -> list[str]:
    """All timings of a model; the lines of the short table."""
    rows, works, start = args.rows, shape.works(), time.perf_counter()
    compile_ahead(
        (work, torch.empty(work.num_out, work.num_in, device=DEVICE, dtype=DTYPE), config)
        for work in works.values()
        for num_rows in rows
        for config in candidates(work, num_rows, args.narrow)
    )
    compiled = time.perf_counter()
    results: Results = {}
    for linear, work in works.items():
        sample = weights(work)
        for num_rows in rows:
            timed = time_linear(work, num_rows, narrow=args.narrow, sample=sample)
            results[linear, num_rows] = timed
            print(f"{name} {linear} {work.form} {work.num_out}x{work.num_in} rows {num_rows}")
            for line in timed[: args.shown + 1]:
                print("  ", line)
        del sample
    timed_at = time.perf_counter()
    if args.json:
        stored = [
            {
                "model": name,
                "linear": linear,
                "rows": num_rows,
                "config": None if t.config is None else dataclasses.asdict(t.config),
                "microseconds": t.microseconds,
            }
            for (linear, num_rows), timed in results.items()
            for t in timed
        ]
        Path(f"{args.json}-{name}.json").write_text(json.dumps(stored))
    table = [f"== {name}: us of the library | of the best, TB/s, share of the read rate, which"]
    for linear, work in works.items():
        size = work.num_out * work.num_in * DTYPE.itemsize
        cells = [cell(results[linear, num_rows], size, read_rate) for num_rows in rows]
        table.append(f"{linear:10s} " + " | ".join(cells))
    stack = Stack(shape, results)
    table.append(f"-- {name} {shape.num_layers} blocks and head, ms: rows, the library's linears")
    table.append(
        "   alone, plain blocks, with dependent launch; fused blocks, with dependent launch"
    )
    table += [stack.line(num_rows) for num_rows in rows]
    table += ["-- small kernels, us each", *time_pieces(shape)]
    parts = {"compile": compiled - start, "time": timed_at - compiled}
    parts["stack"] = time.perf_counter() - timed_at
    table.append("seconds: " + ", ".join(f"{part} {t:.1f}" for part, t in parts.items()))
    return table


def cell(timed: Sequence[Timed], num_bytes: int, read_rate: float) -> str:
    best = fastest(timed)
    rate, c = num_bytes / best.microseconds * 1e6, best.config
    label = "lib" if c is None else f"{c.kind[0]}{c.block_out}x{c.block_in}w{c.num_warps}"
    if c is not None:
        label += "W" * c.weights_first + "n" * c.norm_apart
    times = f"{timed[0].microseconds:6.1f} {best.microseconds:6.1f}"
    return f"{times} {rate / 1e12:4.2f} {rate / read_rate:4.0%} {label:13s}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument(
        "--rows", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4, 16, 64, 256]
    )
    parser.add_argument("--narrow", action="store_true", help="only what a start would time")
    parser.add_argument("--shown", type=int, default=4, help="candidates shown for each linear")
    parser.add_argument("--json", default="", help="prefix of files with all timings")
    args = parser.parse_args()
    with torch.inference_mode():
        read_rate = ReadBandwidth(DEVICE).measure(num_passes=10)
        print(torch.cuda.get_device_name(), f"read {read_rate / 1e12:.3f} TB/s", launch_options())
        tables = [run_model(name, MODELS[name], args, read_rate) for name in args.models]
    for table in tables:
        print("\n".join(table))


if __name__ == "__main__":
    main()
