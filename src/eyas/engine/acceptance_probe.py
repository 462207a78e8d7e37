"""Does the draft read the right boundaries? A short text tells at start-up (design D3).

Layer ids that are off by one break nothing: the output stays the target's, and acceptance is lower.
So a fixed text runs through the target once, its boundaries and their neighbours are captured, and
the draft foretells the target's greedy choices from each set. A set is better when the draft gives
these choices more probability (a paired test by position) and hits more of them.

Shape suffixes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.contract.draft import Draft
from eyas.engine.check_report import CheckReport
from eyas.engine.engine import Engine
from eyas.engine.probe_text import ANSWER, QUESTION
from eyas.engine.tokenizer import Tokenizer
from eyas.engine.worker import Worker
from eyas.models.findings import Findings
from eyas.types import EyasError

logger = logging.getLogger(__name__)

MIN_TOKENS = 64  # a shorter text (a tiny cache or model length) tells nothing
# What "clearly better" is. The mean gain in its standard errors: 1 in 30,000 by chance, and eight
# neighbours are looked at. The gain in nats and in hits: less would not be worth a change.
MIN_STANDARD_ERRORS, MIN_GAIN, MIN_HITS_GAIN = 4.0, 0.05, 0.01
_LOGIT_ROWS = 64  # rows of logits at once


@dataclasses.dataclass(frozen=True)
class BoundaryScore:
    """How well a draft that reads these boundaries foretells the target's greedy choices.

    hit_T: bool, whether its best token was the target's; log_prob_T: fp32, of the target's token;
    both over the positions whose token the draft's vocabulary has.
    """

    boundaries: tuple[int, ...]
    hit_T: Tensor
    log_prob_T: Tensor

    @property
    def hits(self) -> float:
        """Share of the positions at which the best token was the target's."""
        return float(self.hit_T.float().mean())

    @property
    def log_prob(self) -> float:
        """Mean log-probability of the target's token."""
        return float(self.log_prob_T.mean())

    def gain_over(self, other: BoundaryScore) -> tuple[float, float]:
        """(mean gain in log-probability, that in its standard errors), position by position."""
        gain_T = (self.log_prob_T - other.log_prob_T).double()
        error = float(gain_T.std()) / len(gain_T) ** 0.5
        mean = float(gain_T.mean())
        return mean, mean / error if error else 0.0

    def is_clearly_better(self, other: BoundaryScore) -> bool:
        """Whether no chance explains the gain, and it is worth a change."""
        gain, errors = self.gain_over(other)
        return (
            errors >= MIN_STANDARD_ERRORS
            and gain >= MIN_GAIN
            and self.hits >= other.hits + MIN_HITS_GAIN
        )


def probe_acceptance(
    engine: Engine, tokenizer: Tokenizer, *, report: CheckReport, chunk_tokens: int
) -> CheckReport:
    """The report, with a warning more where neighbouring boundaries suit the draft better.

    Call it before the first request: the text uses pages of the cache. chunk_tokens: rows of one
    forward at most. Without a draft, or where the text does not fit, nothing is run.
    """
    if report.draft is None:
        return report
    start = time.perf_counter()
    token_ids = probe_token_ids(tokenizer)
    scores = engine.worker.run(score_boundaries, token_ids, chunk_tokens=chunk_tokens)
    findings = Findings(report.findings)
    if scores:
        report_better(scores[0], scores[1:], findings)
    logger.debug("acceptance probe: %.2f s", time.perf_counter() - start)
    return dataclasses.replace(report, findings=tuple(findings))


def probe_token_ids(tokenizer: Tokenizer) -> list[int]:
    """The text as a chat where the model has a template, as plain text otherwise."""
    try:
        prompt = tokenizer.render_chat([{"role": "user", "content": QUESTION}])
    except EyasError:  # no template, or one that refuses a lone question
        return tokenizer.encode(f"{QUESTION}\n\n{ANSWER}")
    return prompt + tokenizer.encode(ANSWER, add_special_tokens=False)


def neighbours(boundaries: Sequence[int], num_layers: int) -> list[tuple[int, ...]]:
    """The sets beside one: all of it shifted by one, then each boundary alone."""
    shifted = []
    for step in (-1, 1):
        shifted.append(tuple(b + step for b in boundaries))
        for place in range(len(boundaries) if len(boundaries) > 1 else 0):
            moved = list(boundaries)
            moved[place] += step
            shifted.append(tuple(moved))
    return [
        one
        for one in shifted
        if min(one) >= 0 and max(one) <= num_layers and list(one) == sorted(set(one))
    ]


def report_better(
    chosen: BoundaryScore, others: Sequence[BoundaryScore], findings: Findings
) -> None:
    """Warn, with the best of the sets that are clearly better than the chosen one."""
    better = [score for score in others if score.is_clearly_better(chosen)]
    if not better:
        return
    best = max(better, key=lambda score: score.log_prob)
    _, errors = best.gain_over(chosen)
    findings.warn(
        "pair",
        "boundaries-neighbour-better",
        f"the draft reads boundaries {list(chosen.boundaries)}, and {list(best.boundaries)} suit "
        f"it better: at {len(best.hit_T)} positions of the start-up text its best token is the "
        f"target's in {best.hits:.1%} instead of {chosen.hits:.1%} (mean log-probability "
        f"{best.log_prob:.2f} instead of {chosen.log_prob:.2f}, {errors:.0f} standard errors)",
        f"try --draft-boundaries {','.join(map(str, best.boundaries))}; "
        "--no-acceptance-probe leaves this test out",
    )


@torch.inference_mode()
def score_boundaries(
    worker: Worker, token_ids: Sequence[int], *, chunk_tokens: int
) -> list[BoundaryScore]:
    """Scores of the draft's boundaries and, after them, of their neighbours.

    token_ids: the text, cut to what the worker holds. chunk_tokens: rows of one forward. Empty
    where there is no draft, or the text is too short or not of the target's vocabulary.
    """
    proposer, target = worker.proposer, worker.runner.target
    num_pages = worker.shape.num_pages - NUM_RESERVED_PAGES
    num_tokens = min(worker.shape.max_model_len, num_pages * worker.shape.page_size)
    token_ids = token_ids[:num_tokens]
    if proposer is None or len(token_ids) < MIN_TOKENS or max(token_ids) >= target.vocab_size:
        return []
    chosen = tuple(proposer.draft.boundaries)
    sets = [chosen, *neighbours(chosen, target.num_layers)]
    tokens_T = torch.tensor(token_ids, device=worker.state.device)
    target.set_eagle3_layers_to_capture(sorted({b for one in sets for b in one}))
    try:
        captured, choice_T = _run_target(worker, tokens_T, chunk_tokens)
    finally:
        target.set_eagle3_layers_to_capture(chosen)
    draft_id_T = _draft_ids(proposer.draft, choice_T, target.vocab_size)
    if int((draft_id_T >= 0).sum()) < MIN_TOKENS:
        return []
    return [_score(worker, one, captured, (tokens_T, draft_id_T)) for one in sets]


def _run_target(
    worker: Worker, tokens_T: Tensor, chunk_tokens: int
) -> tuple[dict[int, Tensor], Tensor]:
    """(captured states [T, H] by boundary, the target's greedy choice after each token)."""
    target = worker.runner.target
    features, choices = [], []
    for start in range(0, len(tokens_T), chunk_tokens):
        end = min(start + chunk_tokens, len(tokens_T))
        position_T = torch.arange(start, end, device=tokens_T.device)
        plan = worker.runner.backend.plan_prefill(
            page_table_BP=_page_table(worker), chunks=[(start, end)], device=tokens_T.device
        )
        output = target.forward(tokens_T[start:end], position_T, plan)
        assert output.features_TF is not None
        features.append(output.features_TF)
        for hidden_TH in torch.split(output.hidden_TH, _LOGIT_ROWS):
            choices.append(target.compute_logits(hidden_TH).argmax(-1))
    parts = torch.split(torch.cat(features), target.hidden_size, dim=-1)
    return dict(zip(target.captured_boundaries, parts, strict=True)), torch.cat(choices)


def _score(
    worker: Worker,
    boundaries: tuple[int, ...],
    captured: dict[int, Tensor],
    text: tuple[Tensor, Tensor],
) -> BoundaryScore:
    """Run the draft over the text as training does: pair t is (token t + 1, states of t), and
    foretells the choice after token t + 1. text: tokens, and draft ids of the choices."""
    assert worker.proposer is not None
    draft, backend = worker.proposer.draft, worker.proposer.backend
    tokens_T, draft_id_T = text
    hits, log_probs = [], []
    for start in range(0, len(tokens_T) - 1, _LOGIT_ROWS):
        end = min(start + _LOGIT_ROWS, len(tokens_T) - 1)
        position_T = torch.arange(start, end, device=tokens_T.device)
        plan = backend.plan_prefill(
            page_table_BP=_page_table(worker), chunks=[(start, end)], device=tokens_T.device
        )
        states = [captured[boundary][start:end] for boundary in boundaries]
        output = draft.forward(
            tokens_T[start + 1 : end + 1],
            draft.combine(torch.cat(states, dim=-1)),
            position_T,
            torch.zeros_like(position_T),
            plan,
        )
        wanted_T = draft_id_T[start + 1 : end + 1]
        known_T = wanted_T >= 0
        logits_TV, wanted_T = output.logits.whole_TV[known_T].float(), wanted_T[known_T]
        hits.append(logits_TV.argmax(-1) == wanted_T)
        log_probs.append(logits_TV.gather(1, wanted_T[:, None])[:, 0] - logits_TV.logsumexp(-1))
    return BoundaryScore(boundaries, torch.cat(hits).cpu(), torch.cat(log_probs).cpu())


def _draft_ids(draft: Draft, token_T: Tensor, vocab_size: int) -> Tensor:
    """The draft's own ids of target tokens, -1 where it has none."""
    target_id_V = draft.target_ids_V
    draft_id_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=token_T.device)
    draft_id_V[target_id_V] = torch.arange(len(target_id_V), device=token_T.device)
    return draft_id_V[token_T]


def _page_table(worker: Worker) -> Tensor:
    """All pages in their order, for the one text."""
    first, device = NUM_RESERVED_PAGES, worker.state.device
    return torch.arange(first, worker.shape.num_pages, device=device)[None]
