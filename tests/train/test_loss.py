"""Which rows are trained on what, the loss and its gradients, and the attention behind them."""

import itertools
import math

import numpy as np
import pytest
import torch
from fixtures.training import Talk, random_talks, talk, target_in
from torch import Tensor

from eyas.train import loss as loss_module
from eyas.train.attention import choose_core, joint_attention
from eyas.train.causal_cores import CausalCore, CpuFlash, Documents, Plain, Plan
from eyas.train.loss import LossOutput, Teacher, distillation_loss
from eyas.train.packing import Batch, Corpus, make_batch, plan_batches
from eyas.types import EyasError

NUM_STEPS, VOCAB = 3, 64


def packed(talks: list[Talk], num_steps: int = NUM_STEPS) -> tuple[Corpus, Batch]:
    corpus = Corpus.read(talks, max_length=1000)
    return corpus, make_batch(corpus, range(len(corpus)), num_steps=num_steps, device="cpu")


def brute_rows(talks: list[Talk], num_steps: int) -> set[tuple[int, int]]:
    """(u, k) by the definition: base t = u - 1 - k, tokens t + 1 .. t + 2 + k all of one answer."""
    found, offset = set(), 0
    for one in talks:
        size = len(one.input_ids)
        for t, k in itertools.product(range(size), range(num_steps)):
            if t + 2 + k < size and all(one.loss_mask[t + 1 : t + 3 + k]):
                found.add((offset + t + 1 + k, k))
        offset += size
    return found


TALKS = [
    talk(range(9), 4),
    Talk(list(range(12)), [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1]),  # a last answer of one token
    Talk(list(range(5)), [1] * 5),  # no prompt at all
    Talk(list(range(6)), [0, 0, 0, 0, 1, 1]),  # the first token after a prompt and its end
    talk(range(7), 3),
]


def test_rows_of_the_loss() -> None:
    corpus, batch = packed(TALKS)
    rows = batch.loss_rows
    valid = {
        (int(u), k)
        for k in range(NUM_STEPS)
        for u, is_valid in zip(rows.row_U, rows.valid_SU[k], strict=True)
        if is_valid
    }
    assert valid == brute_rows(TALKS, NUM_STEPS)
    # The pair of the last prompt token with the first answer token is trained at every step.
    assert {(4 + k, k) for k in range(NUM_STEPS)} <= valid
    counts = corpus.loss_counts(NUM_STEPS)
    assert counts.sum(0).tolist() == rows.valid_SU.sum(1).tolist()
    alone = [len(brute_rows([one], 1)) for one in TALKS]
    assert counts[:, 0].tolist() == alone


def test_what_a_step_reads() -> None:
    corpus, batch = packed(TALKS)
    flat = [token for one in TALKS for token in one.input_ids]
    for k in range(NUM_STEPS):
        assert batch.shifted(k)[: len(flat) - 1 - k].tolist() == flat[1 + k :]
    assert batch.num_rows % 64 == 0 and batch.num_tokens == len(flat)
    assert sum(batch.documents.lengths) == batch.num_rows
    starts = batch.documents.starts_E.tolist()[:-1]
    assert [int(batch.position_T[start]) for start in starts] == [0] * len(starts)


def test_talks_without_answers_are_left_out() -> None:
    silent = Talk([1, 2, 3], [0, 0, 0])
    assert Corpus.read([silent, *TALKS, silent], max_length=1000).num_dropped == 2
    with pytest.raises(EyasError, match="loss_mask"):
        Corpus.read([silent], max_length=1000)
    with pytest.raises(EyasError, match="first 4 tokens"):
        Corpus.read([talk(range(9), 4)], max_length=4)


def test_long_talks_are_cut() -> None:
    corpus = Corpus.read([talk(range(50), 4), talk(range(10), 4)], max_length=20)
    assert corpus.lengths.tolist() == [20, 10] and corpus.num_cut == 1


def test_batches_take_every_talk_once_an_epoch() -> None:
    lengths = np.array([30, 20, 50, 10, 40, 25, 5])
    plans = plan_batches(lengths, tokens_per_batch=60, seed=1)
    batches = [members for _, members in itertools.islice(plans, 12)]
    assert all(lengths[members].sum() <= 60 for members in batches)
    flat = list(itertools.chain(*batches))
    assert sorted(flat[:7]) == list(range(7)) == sorted(flat[7:14]) and flat[:7] != flat[7:14]
    again = plan_batches(lengths, tokens_per_batch=60, seed=1)
    assert batches == [members for _, members in itertools.islice(again, 12)]


class Case:
    """A batch with random states, a head and a teacher in fp64."""

    def __init__(self, *, require_kept_argmax: bool = True) -> None:
        generator = torch.Generator().manual_seed(4)
        self.target = target_in(torch.float64)
        self.corpus, self.batch = packed([*TALKS, *random_talks(3)])
        rows = self.batch.num_rows

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.z = [random(rows, 32) for _ in range(NUM_STEPS)]
        self.head_VH = random(40, 32)
        self.kept_V = torch.arange(0, 60, 1)[:40] + 3
        teacher_hidden = random(rows, 32)
        self.teacher = Teacher(self.target, teacher_hidden, self.kept_V, require_kept_argmax)
        self.normalizer = self.corpus.loss_counts(NUM_STEPS).sum(0).tolist()

    def run(self) -> LossOutput:
        return distillation_loss(
            self.z,
            self.head_VH,
            self.teacher,
            self.batch.loss_rows,
            normalizer_S=self.normalizer,
            decay=0.8,
        )

    def plain(self) -> tuple[list[float], list[int], list[Tensor]]:
        """(loss by step, correct by step, gradients) by autograd over whole logits, row by row."""
        leaves = [x.clone().requires_grad_() for x in (*self.z, self.head_VH)]
        logits_TV = self.target.compute_logits(self.teacher.hidden_TH)
        best_T = logits_TV.argmax(-1).tolist()
        kept = self.kept_V.tolist()
        p_TV = torch.softmax(logits_TV[:, self.kept_V], dim=-1)
        losses, correct = [], [0] * NUM_STEPS
        total = torch.zeros((), dtype=torch.float64)
        pairs = brute_rows([*TALKS, *random_talks(3)], NUM_STEPS)
        for k in range(NUM_STEPS):
            step = torch.zeros((), dtype=torch.float64)
            num_rows = 0
            for u, _ in (pair for pair in sorted(pairs) if pair[1] == k):
                num_rows += 1
                q = torch.log_softmax(leaves[-1] @ leaves[k][u - 1 - k], dim=-1)
                correct[k] += kept[int(q.argmax())] == best_T[u]
                if best_T[u] in kept or not self.teacher.require_kept_argmax:
                    step = step - (p_TV[u] * q).sum()
            assert num_rows == self.normalizer[k]
            losses.append(float(step.detach()) / num_rows)
            total = total + 0.8**k * step / num_rows
        return losses, correct, list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("require_kept_argmax", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1, 2**14, 2**26])
def test_loss_equals_the_plain_way(
    require_kept_argmax: bool, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, accuracy and every gradient, whatever the chunks."""
    monkeypatch.setitem(loss_module.CHUNK_BYTES, "cpu", chunk_bytes)
    case = Case(require_kept_argmax=require_kept_argmax)
    losses, correct, grads = case.plain()
    output = case.run()
    torch.testing.assert_close(output.loss_S, torch.tensor(losses, dtype=torch.float64))
    assert output.correct_S.tolist() == correct
    for ours, plain in zip([*output.grad_z, output.grad_head_VH], grads, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-14)
    best = case.target.compute_logits(case.teacher.hidden_TH).argmax(-1)
    share_kept = torch.isin(best[case.batch.loss_rows.row_U], case.kept_V).double().mean()
    assert 0.3 < share_kept < 0.9, "the case must have rows of both kinds"


def test_accuracy_counts_what_cannot_be_proposed_as_wrong() -> None:
    """A draft that repeats the target's kept logits is right only where the best one is kept."""
    case = Case()
    target_logits = case.target.compute_logits(case.teacher.hidden_TH)
    embed, head = case.target.get_embed_and_head()
    case.head_VH = head[case.kept_V]
    rows = case.batch.num_rows
    for k in range(NUM_STEPS):
        case.z[k] = case.teacher.hidden_TH.roll(-1 - k, 0)[:rows]
    output = case.run()
    valid_SU, row_U = case.batch.loss_rows.valid_SU, case.batch.loss_rows.row_U
    is_kept_U = torch.isin(target_logits.argmax(-1)[row_U], case.kept_V)
    assert output.correct_S.tolist() == (valid_SU & is_kept_U).sum(1).tolist()
    assert (output.correct_S < valid_SU.sum(1)).all()


def brute_attention(inputs: list[Tensor], documents: Documents) -> Tensor:
    """One row and head at a time: causal keys of the document, then the row's own later keys."""
    q, k, v, *diagonals = inputs
    group = q.shape[1] // k.shape[1]
    rows = []
    for start, end in documents.spans():
        for t, head in itertools.product(range(start, end), range(q.shape[1])):
            kv = head // group
            keys = torch.stack([*k[start : t + 1, kv], *(d[t, kv] for d in diagonals[::2])])
            values = torch.stack([*v[start : t + 1, kv], *(d[t, kv] for d in diagonals[1::2])])
            rows.append(torch.softmax(keys @ q[t, head] / math.sqrt(q.shape[2]), 0) @ values)
    return torch.stack(rows).view_as(q)


@pytest.mark.parametrize("num_diagonals", [0, 1, 3])
@pytest.mark.parametrize("core", [CpuFlash(), Plain()], ids=["flash", "plain"])
def test_joint_softmax(core: CausalCore, num_diagonals: int) -> None:
    """Outputs and all gradients, fp64, against a softmax over one list of keys."""
    generator = torch.Generator().manual_seed(num_diagonals)
    documents = Documents.of((5, 1, 11), "cpu")
    heads = (6, *[2] * (2 + 2 * num_diagonals))
    inputs = [
        torch.randn(17, count, 10, generator=generator, dtype=torch.float64).requires_grad_()
        for count in heads
    ]
    grad = torch.randn(17, 6, 10, generator=generator, dtype=torch.float64)
    pairs = list(zip(inputs[3::2], inputs[4::2], strict=True))
    plan = Plan(documents, 1 / math.sqrt(10))
    out = joint_attention(core, plan, inputs[0], (inputs[1], inputs[2]), pairs)
    expected = brute_attention(inputs, documents)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours, brute = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    for a, b in zip(ours, brute, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_fast_core_is_taken() -> None:
    """Here the CPU's flash kernel passes its own trial in every dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        q, k = torch.zeros(1, 6, 16, dtype=dtype), torch.zeros(1, 2, 16, dtype=dtype)
        assert isinstance(choose_core(q, k, k), CpuFlash)


def test_a_core_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(self: CpuFlash, *args: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = Plain()._attend(*args)  # type: ignore[arg-type]
        return out, lse + 0.1

    monkeypatch.setattr(CpuFlash, "_attend", transposed)
    q, k = torch.zeros(1, 3, 14), torch.zeros(1, 1, 14)  # a shape of its own: trials are kept
    assert isinstance(choose_core(q, k, k), Plain)
