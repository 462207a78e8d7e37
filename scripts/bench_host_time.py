"""Host time of a greedy round: everything but target, draft and vocabulary-sized work.

Target and draft are stand-ins that return zeros at once over a vocabulary of 8, so what is left
of a step is the scheduler, the planning of attention, acceptance, commit and the slot updates.

    python scripts/bench_host_time.py
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from eyas.config import PLAIN, TreeShape
from eyas.contract.attention import Attention, KVLayout
from eyas.contract.target import GivenRows, LocalLogits, TargetOutput
from eyas.engine.engine import Engine
from eyas.engine.worker import Worker, WorkerShape
from eyas.models.scripted import ScriptedDraft
from eyas.types import SamplingParams

VOCAB = 8


class NoTarget:
    """Implements contract.target.Target without doing anything."""

    hidden_size, vocab_size, num_layers = 1, VOCAB, 1
    kv_layout = KVLayout(1, 1, 1, 1)
    captured_boundaries: tuple[int, ...] = ()

    def set_eagle3_layers_to_capture(self, boundaries: object) -> None:
        """Nothing to capture."""

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        given: GivenRows | None = None,
    ) -> TargetOutput:
        """Zeros."""
        zeros = torch.zeros(len(tokens_T), 1)
        return TargetOutput(zeros, zeros)

    def compute_logits(self, hidden_TH: Tensor) -> Tensor:
        """Zeros: token 0 is always chosen."""
        return torch.zeros(len(hidden_TH), VOCAB)

    def compute_local_logits(self, hidden_TH: Tensor) -> LocalLogits:
        """The same."""
        return LocalLogits(self.compute_logits(hidden_TH))


def step_milliseconds(num_requests: int, tree: TreeShape, *, num_steps: int = 150) -> float:
    """Median time of an engine step."""
    shape = WorkerShape(
        num_slots=num_requests, num_pages=4000, page_size=16, max_model_len=2048, tree=tree
    )
    draft = None
    if tree is not PLAIN:
        draft = ScriptedDraft([], vocab_size=VOCAB, num_slots=num_requests + 1)
    dtype = torch.float32
    worker = Worker(
        NoTarget(),  # type: ignore[arg-type]
        draft,
        shape=shape,
        dtype=dtype,
        draft_dtype=dtype,
        device="cpu",
    )
    engine = Engine(worker, eos_token_ids=[], vocab_size=VOCAB, chunk_tokens=4096, run_ahead=1)
    for number in range(num_requests):
        params = SamplingParams(temperature=0, ignore_eos=True)
        engine.add(str(number), [1] * 16, params)
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[10:]) * 1e3


def main() -> None:
    """Print a table; the stand-in draft of the chain rows costs a little too."""
    torch.set_num_threads(1)
    print("requests  shape      host ms a round")
    for num_requests in (1, 16):
        for name, tree in (("plain", PLAIN), ("chain 3", TreeShape(3, 1, 4))):
            print(f"{num_requests:8}  {name:9}  {step_milliseconds(num_requests, tree):.3f}")


if __name__ == "__main__":
    main()
