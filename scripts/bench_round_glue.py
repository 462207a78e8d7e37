"""Checks the round's Triton steps on a GPU against torch's, then times them in CUDA graphs.

    python scripts/bench_round_glue.py [--seconds 60]

The models are stand-ins that return tensors made beforehand, so that a round is nothing but its
glue: drafting, choice, acceptance, commit and extend. Sizes are Llama-3.1-8B's. Prints microseconds
a round (and a launch of each kernel), the torch steps beside the Triton ones; what time does not
allow is left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from eyas import kernels
from eyas.cache.pool import KVPool
from eyas.config import PLAIN, TreeShape
from eyas.contract.attention import KVLayout
from eyas.contract.draft import DraftOutput
from eyas.contract.target import LocalLogits, TargetOutput
from eyas.kernels import SamplingMode, triton_draft, triton_sampling
from eyas.speculative.proposer import Proposer
from eyas.speculative.round import RoundRunner
from eyas.speculative.simulate import SimulatedAcceptance
from eyas.speculative.state import SlotState
from eyas.speculative.torch_steps import TorchSteps
from eyas.speculative.triton_steps import TritonSteps

DEVICE = torch.device("cuda")
VOCAB, DRAFT_VOCAB, HIDDEN, PAGE, NUM_PAGES, TABLE = 128256, 32000, 4096, 16, 256, 2048
LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
CHAIN, TREE = TreeShape(3, 1, 4), TreeShape(6, 8, 32)
SHAPES = {"chain 3": CHAIN, "plain": PLAIN, "tree 6x8x32": TREE}
MODES = {"greedy": SamplingMode(), "sampled": SamplingMode(noise=True)}
TRUNCATED = SamplingMode(noise=True, truncate=True)
OPTIONS = SamplingMode(noise=True, truncate=True, penalize=True, bias=True)
RATE = 0.81  # of a simulated acceptance of 3 tokens a round of the chain


class Models:
    """Stand-ins for a target and a draft.

    varied: logits follow from the token, so that the draft is right now and then; else they are
    the same tensors whatever is asked.
    """

    def __init__(self, num_rows: int, *, varied: bool) -> None:
        torch.manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        self.varied = varied
        self.logits_TV = random(64 if varied else num_rows, VOCAB) * 2
        self.target_ids_V = torch.arange(DRAFT_VOCAB, device=DEVICE) * 4
        self.draft_logits_TV = self.logits_TV[:, self.target_ids_V].contiguous()
        if varied:  # the target's favourites can be drafted
            self.logits_TV[:, self.target_ids_V] += 3
            kept_TV = self.logits_TV[:, self.target_ids_V].float()  # fp32: without ties
            self.draft_logits_TV = kept_TV + torch.randn_like(kept_TV) / 8
        self.hidden_TH, self.features_TF = random(num_rows, HIDDEN), random(num_rows, 3 * HIDDEN)

    def _row(self, tokens_T: Tensor) -> Tensor:
        return tokens_T // 4 % 64

    def target(self, tokens_T: Tensor, position_T: Tensor, plan: Any) -> TargetOutput:
        num_rows = len(tokens_T)
        hidden = self._row(tokens_T) if self.varied else self.hidden_TH[:num_rows]
        return TargetOutput(hidden, self.features_TF[:num_rows])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if self.varied:
            return self.logits_TV.index_select(0, hidden)
        return self.logits_TV[: len(hidden)]

    def draft(
        self, tokens_T: Tensor, hidden_TH: Tensor, position_T: Tensor, slots_T: Tensor, plan: Any
    ) -> DraftOutput:
        num_rows = len(tokens_T)
        if self.varied:
            logits_TV = self.draft_logits_TV.index_select(0, self._row(tokens_T))
            return DraftOutput(logits_TV, hidden_TH + self.hidden_TH[:num_rows])
        return DraftOutput(self.draft_logits_TV[:num_rows], self.hidden_TH[:num_rows])


def make_runner(
    batch: int, shape: TreeShape, *, triton: bool, varied: bool, simulated: bool
) -> RoundRunner:
    """A runner over slots in mid-answer."""
    state = SlotState(
        num_slots=batch + 1,
        max_pages=TABLE,
        vocab_size=VOCAB,
        draft_hidden_size=HIDDEN,
        draft_dtype=torch.bfloat16,
        topk=shape.topk,
        device=DEVICE,
    )
    generator = torch.Generator(DEVICE).manual_seed(1)
    live = slice(0, batch)

    def numbers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, device=DEVICE)

    state.length_S[live] = numbers(100, 900, batch)
    state.pending_S[live] = numbers(0, VOCAB, batch)
    state.remaining_S[live] = 10**6
    state.active_S[live] = True
    state.max_draft_S[live] = 2**31
    state.seed_S[live] = numbers(-(2**62), 2**62, batch)
    state.temperature_S[live] = 0.8
    state.top_k_S[live], state.top_p_S[live], state.min_p_S[live] = 50, 0.9, 0.01
    state.presence_S[live], state.frequency_S[live], state.repetition_S[live] = 0.3, 0.2, 1.1
    state.bias_id_SA[live, :3] = torch.tensor([4, 40, 44], device=DEVICE)
    state.bias_value_SA[live, :3] = torch.tensor([1.0, -2.0, 3.0], device=DEVICE)
    state.prompt_seen_SV[live, ::3] = True
    state.page_table_SP[live] = numbers(2, NUM_PAGES, batch, TABLE)
    num_rows = (batch + 1) * max(shape.num_nodes, shape.topk)
    models = Models(num_rows, varied=varied)
    num_scratch = max(shape.num_nodes, shape.num_draft_rows, 1)
    pool = KVPool(
        LAYOUT,
        num_pages=NUM_PAGES,
        page_size=PAGE,
        num_slots=batch + 1,
        num_scratch_rows=num_scratch,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    backend: Any = SimpleNamespace(
        pool=pool,
        plan_tree=lambda **settings: None,
        plan_write=lambda rows_T: None,
        scratch_rows=lambda slots_B, node_Q: (
            pool.num_page_rows + slots_B[:, None] * num_scratch + node_Q
        ),
    )
    draft: Any = SimpleNamespace(
        forward=models.draft,
        combine=lambda features_TF: models.hidden_TH[: len(features_TF)],
        write_kv=lambda *arguments: None,
        target_ids_V=models.target_ids_V,
    )
    target: Any = SimpleNamespace(
        forward=models.target,
        compute_local_logits=lambda hidden: LocalLogits(models.compute_logits(hidden)),
    )
    proposer = Proposer(draft, backend, state, num_pages=NUM_PAGES)
    acceptance = SimulatedAcceptance((RATE,) * shape.depth, device=DEVICE) if simulated else None
    runner = RoundRunner(
        target=target, backend=backend, state=state, proposer=proposer, simulated=acceptance
    )
    steps: Any = (TritonSteps if triton else TorchSteps)(state)
    runner.steps = proposer.steps = steps
    runner.sampler = steps.sampler
    return runner


def compare(batch: int, shape: TreeShape, mode: SamplingMode, simulated: bool) -> str:
    """Rounds of both steps side by side; what differs, or what was accepted."""
    ours, theirs = (
        make_runner(batch, shape, triton=t, varied=True, simulated=simulated) for t in (True, False)
    )
    slots_B = torch.tensor([*range(batch), batch], device=DEVICE)
    accepted = 0.0
    for runner in (ours, theirs):
        if shape.depth:
            assert runner.proposer is not None
            runner.proposer.prime(slots_B, max_kv_len=1024, mode=mode)
    for number in range(4):
        got, want = (
            runner.round(slots_B, shape, max_kv_len=1024, mode=mode).packed[:-1]
            for runner in (ours, theirs)
        )
        if not torch.equal(got[:, -3:], want[:, -3:]):
            return f"FAILED: counts of round {number} differ"
        valid = torch.arange(got.shape[1] - 3, device=DEVICE) < want[:, -3:-2]
        if not torch.equal(got[:, :-3] * valid, want[:, :-3] * valid):
            return f"FAILED: tokens of round {number} differ"
        accepted += float(want[:, -1].double().mean()) / 4
        for name, value in vars(theirs.state).items():
            if isinstance(value, Tensor) and value.dim():
                mine = getattr(ours.state, name)[:-1].float()
                if not torch.allclose(mine, value[:-1].float(), atol=2e-3, rtol=2e-3):
                    return f"FAILED: {name} after round {number} differs"
    pools = [runner.backend.pool for runner in (ours, theirs)]
    if any(int(x.count_nonzero()) for pool in pools for x in (pool.k_LRKD,)):
        return "FAILED: nobody wrote keys, yet there are some"
    return f"equal; {accepted:.2f} drafted tokens accepted a round"


def compare_noise() -> str:
    """The noise of the kernels against torch's on the same device."""
    seed_R = torch.tensor([0, -1, 2**62, 12345], device=DEVICE)
    position_R = torch.tensor([1, 2, 3, 100000], device=DEVICE)
    token_V = torch.arange(VOCAB, device=DEVICE)
    ours = triton_sampling.gumbel_noise(seed_R, position_R, token_V)
    theirs = kernels.gumbel_noise(seed_R, position_R, token_V)
    worst = float((ours - theirs).abs().max())
    return f"{'equal' if worst < 4e-6 else 'FAILED'}: at most {worst:.1e} apart"


def compare_rows() -> str:
    """Committed rows, in all layers."""
    from eyas.kernels import reference, triton_round

    pool_LRKD = torch.randn(32, 512, 8, 128, device=DEVICE).to(torch.bfloat16)
    source_T = torch.tensor([400, 401, 402, 403], device=DEVICE)
    destination_T = torch.tensor([33, 34, 16, 90], device=DEVICE)
    want = pool_LRKD.clone()
    reference.copy_kv_rows(want, source_T[[0, 1, 3]], destination_T[[0, 1, 3]])
    other = pool_LRKD.clone()
    triton_round.copy_rows([pool_LRKD, other], source_T, destination_T, trash_row=16)
    same = torch.equal(pool_LRKD, want) and torch.equal(other, want)
    return "equal" if same else "FAILED"


def microseconds(run: Callable[[], Any], *, repeats: int = 1, replays: int = 50) -> float:
    """Time of `run` by the median of graph replays; repeats: runs in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays // 5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (replays // 5) / repeats)
    return sorted(times)[2]


def time_round(batch: int, shape: TreeShape, mode: SamplingMode, *, triton: bool) -> float:
    runner = make_runner(batch, shape, triton=triton, varied=False, simulated=shape.depth > 0)
    slots_B = torch.arange(batch, device=DEVICE)
    return microseconds(lambda: runner.round(slots_B, shape, max_kv_len=1024, mode=mode))


def time_kernels(batch: int) -> dict[str, float]:
    """A launch (or the two of a choice) of the chain's kernels, microseconds."""
    runner = make_runner(batch, CHAIN, triton=True, varied=False, simulated=False)
    state, steps, backend = runner.state, runner.steps, runner.backend
    assert runner.proposer is not None
    proposer, noisy = runner.proposer, SamplingMode(noise=True)
    slots_B = torch.arange(batch, device=DEVICE)
    start = steps.begin(slots_B, CHAIN)
    tree = steps.grow(start, CHAIN, mode=noisy, proposer=proposer).finish()
    position_T = tree.positions(start.length_B).reshape(-1)
    logits = runner.target.compute_local_logits(position_T)
    draft_logits = proposer.draft.forward(slots_B, *[slots_B] * 3, None).logits_TV  # type: ignore
    chosen_T = tree.token_BN.reshape(-1).clone()
    arguments: dict[str, Any] = {
        "shape": CHAIN,
        "backend": backend,
        "mode": SamplingMode(),
        "simulated": None,
    }
    settled = steps.settle(start, tree, chosen_T, **arguments)
    hidden_TH = proposer.draft.combine(position_T)
    draft = {"temperature_S": state.temperature_S, "seed_S": state.seed_S}

    def propose(topk: int, noise: bool) -> Any:
        ids_V = proposer.draft.target_ids_V
        return triton_draft.propose(
            draft_logits, slots_B, slots_B, ids_V, topk=topk, noise=noise, **draft
        )

    pool = backend.pool
    runs: dict[str, Callable[[], Any]] = {
        "begin": lambda: steps.begin(slots_B, CHAIN),
        "propose 1 greedy": lambda: propose(1, False),
        "propose 1 sampled": lambda: propose(1, True),
        "propose 8 sampled": lambda: propose(8, True),
        "choose greedy": lambda: steps.choose(logits, slots_B, position_T, tree, SamplingMode()),
        "choose sampled": lambda: steps.choose(logits, slots_B, position_T, tree, noisy),
        "choose top-k, top-p": lambda: steps.choose(logits, slots_B, position_T, tree, TRUNCATED),
        "choose all options": lambda: steps.choose(logits, slots_B, position_T, tree, OPTIONS),
        "settle": lambda: steps.settle(start, tree, chosen_T, **arguments),
        "copy rows": lambda: pool.copy_rows(settled.source_T, settled.destination_T),
        "keep hidden": lambda: steps.keep(hidden_TH, settled.entries, proposer.page_end_PH),
    }
    return {name: microseconds(run, repeats=10, replays=10) for name, run in runs.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    deadline = time.monotonic() + parser.parse_args().seconds
    print(f"noise: {compare_noise()}\ncopied rows: {compare_rows()}")
    for name, shape in SHAPES.items():
        for mode_name, mode in MODES.items():
            for simulated in (False, True)[: 1 + (shape.depth > 0)]:
                kind = "simulated" if simulated else "real"
                result = compare(3, shape, mode, simulated)
                print(f"{name}, {mode_name}, {kind} acceptance: {result}", flush=True)
    for name, shape in (("chain 3", CHAIN), ("tree", TREE)):
        for kind, mode in (("truncated", TRUNCATED), ("all options", OPTIONS)):
            print(f"{name}, {kind}: {compare(3, shape, mode, False)}", flush=True)
    table = []
    for name, shape in SHAPES.items():
        for mode_name, mode in MODES.items():
            row = [f"{name:12s} {mode_name:8s}"]
            for batch in (1, 16, 64):
                if time.monotonic() > deadline - 8:
                    row.append("      -    /   -   ")
                    continue
                ours, theirs = (time_round(batch, shape, mode, triton=t) for t in (True, False))
                row.append(f"{ours:8.1f} /{theirs:9.1f}")
                torch.cuda.empty_cache()
            table.append("  ".join(row))
            print(table[-1], flush=True)
    by_batch = {batch: time_kernels(batch) for batch in (1, 16, 64)}
    print("\nmicroseconds a round, Triton / torch, at batch 1, 16, 64")
    print("\n".join(table))
    print("\nmicroseconds a step of the chain, at batch 1, 16, 64")
    for name in by_batch[1]:
        print(f"{name:20s}" + "".join(f"{by_batch[batch][name]:9.2f}" for batch in by_batch))


if __name__ == "__main__":
    main()
