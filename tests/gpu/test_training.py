"""Draft training on a CUDA device: the fast attention is taken, and no step waits for the host."""

import pytest
import torch
from fixtures.tiny import llama_config, tiny_target
from fixtures.training import random_talks, settings

from eyas.models.llama import LlamaForCausalLM
from eyas.train.attention import choose_core
from eyas.train.causal_cores import VarlenFlash
from eyas.train.draft import build_draft, design_draft
from eyas.train.packing import Corpus
from eyas.train.processes import Processes
from eyas.train.trainer import Trainer

# Head sizes that the flash kernels take.
CONFIG = llama_config(hidden_size=128, num_heads=6, num_kv_heads=2, head_dim=64)


def make_trainer(device: str, dtype: torch.dtype) -> Trainer:
    target = LlamaForCausalLM(CONFIG, dtype=dtype, device=device)
    source = tiny_target(CONFIG).state_dict()
    with torch.no_grad():
        for name, parameter in target.state_dict().items():
            parameter.copy_(source[name])
    kept_V = torch.arange(0, 64, 2)
    draft = build_draft(target, design_draft(CONFIG, len(kept_V)), kept_V, seed=0)
    options = settings(num_draft_steps=7, tokens_per_step=128, tokens_per_batch=128)
    corpus = Corpus.read(random_talks(12), max_length=64)
    return Trainer(target, draft, corpus, settings=options)


def run_steps(trainer: Trainer, count: int) -> list[float]:
    for step, (_, plan) in zip(range(1, count + 1), trainer.plans(0), strict=False):
        trainer.run_step(step, plan)
    return trainer.metrics.read(Processes())[0]


def test_flash_attention_is_taken() -> None:
    for num_heads, num_kv_heads, head_dim in ((6, 2, 64), (9, 3, 64), (32, 8, 128)):
        q, k = (
            torch.zeros(1, heads, head_dim, dtype=torch.bfloat16, device="cuda")
            for heads in (num_heads, num_kv_heads)
        )
        assert isinstance(choose_core(q, k, k), VarlenFlash)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_does_not_wait() -> None:
    trainer = make_trainer("cuda", torch.bfloat16)
    run_steps(trainer, 1)
    plans = trainer.plans(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.run_step(2, next(plans)[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_losses_are_those_of_a_cpu() -> None:
    cpu = run_steps(make_trainer("cpu", torch.float32), 3)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        cuda = run_steps(make_trainer("cuda", dtype), 3)
        torch.testing.assert_close(
            torch.tensor(cuda), torch.tensor(cpu), rtol=tolerance, atol=tolerance
        )
