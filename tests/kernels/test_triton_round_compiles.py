"""The round's kernels as a GPU's compiler takes them, for a chain and for a tree."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from fixtures.compile_only import compiling_for
from torch import Tensor

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the compiler of triton"
)
SLOTS, REQUESTS, PAGES, VOCAB, DRAFT_VOCAB, HIDDEN = 5, 2, 40, 9000, 5000, 512


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def half(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.bfloat16)


def slot_state(topk: int) -> SimpleNamespace:
    from eyas.speculative.state import SlotState

    state = SlotState(
        num_slots=SLOTS,
        max_pages=PAGES,
        vocab_size=VOCAB,
        draft_hidden_size=HIDDEN,
        draft_dtype=torch.bfloat16,
        topk=topk,
        device="cpu",
    )
    return SimpleNamespace(**vars(state))


def draft(state: SimpleNamespace, depth: int, topk: int, num_nodes: int) -> dict[str, Tensor]:
    """A round's first half."""
    from eyas.kernels import triton_draft, triton_round, triton_tree

    slots_B, ids_V = numbers(REQUESTS), numbers(DRAFT_VOCAB)
    names = ("length_S", "pending_S", "page_table_SP", "draft_hidden_SH")
    names += ("candidate_token_SK", "candidate_score_SK")
    start = triton_round.begin(
        slots_B,
        **{name: getattr(state, name) for name in names},
        depth=depth,
        topk=topk,
        num_nodes=num_nodes,
    )
    settings = {"temperature_S": state.temperature_S, "seed_S": state.seed_S, "topk": topk}
    logits_TV, slots_T = half(REQUESTS * topk, DRAFT_VOCAB), start["slots_T"]
    proposals = triton_draft.propose(logits_TV, slots_T, slots_T, ids_V, noise=True, **settings)
    first = triton_draft.propose(
        logits_TV[:REQUESTS], slots_B, slots_B, ids_V, noise=False, **settings
    )
    triton_draft.store_first_level(
        first,
        slots_B,
        ids_V,
        half(REQUESTS, HIDDEN),
        candidate_token_SK=state.candidate_token_SK,
        candidate_score_SK=state.candidate_score_SK,
        draft_hidden_SH=state.draft_hidden_SH,
    )
    if topk == 1:
        triton_draft.extend_chain(proposals, ids_V, start["token_BN"], column=2)
        return start
    beams = triton_tree.Beams(
        *(start[f"{name}_T"] for name in ("token", "score", "candidate", "seen")),
        hidden_TH=start["hidden_TH"],
    )
    candidates = triton_tree.Candidates(start["token_BA"], start["score_BA"], start["parent_BA"])
    for level in (1, depth - 1):
        triton_tree.advance(
            proposals, ids_V, beams, beams.hidden_TH, candidates, level=level, depth=depth
        )
    triton_tree.finish(
        candidates, start["root_B"], start["length_B"], num_nodes=num_nodes, depth=depth
    )
    return start


def choose(state: SimpleNamespace, start: dict[str, Tensor]) -> None:
    """The target's choices, with every processor."""
    from eyas.kernels import triton_process, triton_sampling, triton_truncate

    slots_B, token_BN, position_T = numbers(REQUESTS), start["token_BN"], start["position_BN"]
    num_nodes = token_BN.shape[1]
    logits_TV = half(REQUESTS * num_nodes, VOCAB)
    visible = numbers(REQUESTS, num_nodes, num_nodes, dtype=torch.bool)
    processed_TV = triton_process.process(
        triton_process.ProcessorTensors.of(state),
        logits_TV,
        slots_B,
        penalize=True,
        bias=True,
        tree=(token_BN, token_BN, visible),
    )
    limits = {name: getattr(state, name) for name in ("temperature_S", "top_k_S", "top_p_S")}
    settings = {name: getattr(state, name) for name in ("temperature_S", "seed_S", "min_p_S")}
    for logits in (logits_TV, processed_TV):
        bounds = triton_truncate.truncation_bounds(logits, slots_B, **limits)
        triton_sampling.choose(
            logits, slots_B, position_T.view(-1), offset=1, noise=True, bounds=bounds, **settings
        )


def settle(state: SimpleNamespace, start: dict[str, Tensor], depth: int) -> None:
    """What follows the choices."""
    from eyas.kernels import triton_round, triton_settle

    slots_B, token_BN = numbers(REQUESTS), start["token_BN"]
    places = triton_settle.Places(
        page_size=16, trash_row=16, trash_page=1, first_scratch=99, num_scratch=64
    )
    for rate_D in (None, torch.zeros(depth)):
        outcome = triton_settle.settle(
            triton_settle.SlotTensors.of(state),
            places,
            slots_B,
            token_BN,
            token_BN,
            start["position_BN"].view(-1),
            depth=depth,
            count=True,
            rate_D=rate_D,
        )
    pool = half(3, 200, 2, 64)
    triton_round.copy_rows([pool, pool], outcome.source_T, outcome.destination_T, trash_row=16)
    triton_round.keep_hidden(
        half(REQUESTS * (depth + 1), HIDDEN),
        slots_B=slots_B,
        page_T=outcome.page_T,
        last_B=outcome.last_B,
        moved_B=outcome.num_emitted_B,
        page_end_PH=half(PAGES, HIDDEN),
        draft_input_SH=state.draft_input_SH,
        trash_page=1,
    )


@pytest.mark.parametrize(
    ("depth", "topk", "num_nodes", "dependent"), [(3, 1, 4, True), (4, 8, 32, False)]
)
def test_all_kernels_of_a_round_compile(
    depth: int, topk: int, num_nodes: int, dependent: bool
) -> None:
    """Without spilling registers to memory, and with dependent launch where it is asked for."""
    from eyas.kernels import triton_launch

    state = slot_state(topk)
    triton_launch.use_pdl(dependent)
    try:
        with compiling_for(90) as compiled:
            start = draft(state, depth, topk, num_nodes)
            choose(state, start)
            settle(state, start, depth)
    finally:
        triton_launch.use_pdl(None)
    assert len(compiled) > 14
    for kernel in compiled:
        ptx, name = kernel.asm["ptx"], kernel.metadata.name
        assert ("griddepcontrol.wait" in ptx) == dependent, name
        assert ".local" not in ptx, name


def test_a_packed_admission_compiles() -> None:
    from eyas.kernels import triton_slots

    rows = [numbers(SLOTS, 32), numbers(SLOTS, 300), numbers(SLOTS, 300, dtype=torch.float32)]
    with compiling_for(90) as compiled:
        triton_slots.write_slot(
            numbers(700),
            numbers=[numbers(SLOTS), numbers(SLOTS), numbers(SLOTS, dtype=torch.int8)],
            floats=[numbers(SLOTS, dtype=torch.float32)] * 6,
            rows=rows,
        )
    assert len(compiled) == 1


def test_distances_from_the_best_logit_are_not_fused() -> None:
    """A product and a difference in one operation are rounded once: the best logit's distance from
    itself is not 0 then, and at small temperatures far from it. The interpreter rounds twice."""
    from eyas.kernels import triton_truncate

    with compiling_for(90) as compiled:
        triton_truncate.truncation_bounds(
            torch.zeros(4, 1000),
            numbers(4),
            temperature_S=numbers(SLOTS, dtype=torch.float32),
            top_k_S=numbers(SLOTS),
            top_p_S=numbers(SLOTS, dtype=torch.float32),
        )
    ptx = compiled[-1].asm["ptx"]
    assert "ex2.approx" in ptx and "fma" not in ptx
