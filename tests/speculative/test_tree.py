"""Draft trees: what is kept, who is whose parent, and what each row may see."""

import dataclasses
import itertools
import math

import pytest
import torch
from fixtures.tiny import fresh_backend, full_forward, random_prompts, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.cache.pool import NUM_RESERVED_PAGES
from eyas.config import MAX_TREE_NODES, TreeShape
from eyas.speculative.tree import Tree, TreeBuilder, chain_tree, tree_from_parents

QUICK = settings(derandomize=True, deadline=None, max_examples=120)
# Few values, so that ties are common; -inf: a token that the draft excludes.
LOG_PROBS = st.sampled_from([0.0, -0.25, -0.5, -1.0, -1.5, -3.0, -math.inf])
ROOT = 0


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    depth, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = min(1 + topk + (depth - 1) * topk**2, MAX_TREE_NODES)
    return TreeShape(depth, topk, draw(st.integers(depth + 1, most)))


@dataclasses.dataclass
class Grown:
    """A batch of trees with what is known of each candidate; every token occurs once."""

    shape: TreeShape
    tree: Tree
    parent: list[dict[int, int]]  # token -> parent's token
    score: list[dict[int, float]]


def grow(shape: TreeShape, num_requests: int, draw_scores: object) -> Grown:
    """Run a builder with tokens 1, 2, 3, ... and check what it keeps of its beams on the way."""
    topk, tokens = shape.topk, itertools.count(1)

    def level(num_parents: int) -> tuple[Tensor, Tensor]:
        size = num_requests * num_parents * topk
        token_X = torch.tensor([next(tokens) for _ in range(size)])
        # A real draft's candidates come best first.
        score = [sorted(draw_scores(topk), reverse=True) for _ in range(size // topk)]  # type: ignore[operator]
        view = (num_requests, num_parents, topk)
        return token_X.view(view), torch.tensor(score, dtype=torch.float32).view(view)

    token, score = level(1)
    builder = TreeBuilder(shape, token[:, 0], score[:, 0])
    grown = Grown(shape, chain_tree(token[:, 0]), [], [])
    for request in range(num_requests):
        pairs = zip(token[request, 0].tolist(), score[request, 0].tolist(), strict=True)
        grown.score.append(dict(pairs))
        grown.parent.append(dict.fromkeys(token[request, 0].tolist(), ROOT))
    rows: list[list[int]] = [[] for _ in range(num_requests)]  # token of each draft row so far
    for _ in range(1, shape.depth):
        check_rows(builder, grown, rows)
        beams = builder.token_BK
        token, score = level(topk)
        for request, beam in itertools.product(range(num_requests), range(topk)):
            above = int(beams[request, beam])
            known = grown.score[request]
            for child, log_prob in zip(
                token[request, beam].tolist(), score[request, beam].tolist(), strict=True
            ):
                grown.parent[request][child] = above
                known[child] = known[above] + log_prob
        hidden = builder.advance(token, score, beams[:, :, None].float())
        # The parent's hidden comes with each new beam: here it is the parent's token.
        for request in range(num_requests):
            new = builder.token_BK[request].tolist()
            assert len(set(new)) == topk
            assert hidden[request, :, 0].tolist() == [grown.parent[request][t] for t in new]
            level_scores = [grown.score[request][t] for t in token[request].flatten().tolist()]
            kept = sorted(grown.score[request][t] for t in new)
            assert kept == sorted(level_scores)[-topk:]
    grown.tree = builder.finish(torch.full((num_requests,), ROOT))
    return grown


def check_rows(builder: TreeBuilder, grown: Grown, rows: list[list[int]]) -> None:
    """Each beam's draft row sees the rows of its ancestors and its own."""
    visible = builder.visible_rows()
    for request, row in enumerate(rows):
        row += builder.token_BK[request].tolist()
        assert visible.shape[2] == len(row)
        for beam, token in enumerate(builder.token_BK[request].tolist()):
            seen = [t for t, sees in zip(row, visible[request, beam].tolist(), strict=True) if sees]
            assert sorted(seen) == sorted(lineage(grown.parent[request], token))


def lineage(parent: dict[int, int], token: int) -> list[int]:
    """A candidate and its ancestors, without the root."""
    return [] if token == ROOT else [token, *lineage(parent, parent[token])]


@QUICK
@given(st.data(), shapes(), st.integers(1, 3))
def test_what_a_tree_is(data: st.DataObject, shape: TreeShape, num_requests: int) -> None:
    grown = grow(
        shape, num_requests, lambda n: data.draw(st.lists(LOG_PROBS, min_size=n, max_size=n))
    )
    tree = grown.tree
    assert tree.token_BN.shape == (num_requests, shape.num_nodes)
    for request in range(num_requests):
        tokens, parents = tree.token_BN[request].tolist(), tree.parent_BN[request].tolist()
        depths, visible = tree.depth_BN[request].tolist(), tree.visible_BNN[request]
        assert (tokens[0], parents[0], depths[0]) == (ROOT, -1, 0)
        assert len(set(tokens)) == shape.num_nodes
        assert tokens == sorted(tokens)  # in order of appearance, hence level by level
        known = grown.parent[request]
        for node in range(1, shape.num_nodes):
            parent = parents[node]
            assert 0 <= parent < node  # parents come first
            assert tokens[parent] == known[tokens[node]]  # and it is the true parent
            assert depths[node] == depths[parent] + 1
        for node in range(shape.num_nodes):
            seen = {tokens[other] for other in visible[node].nonzero().view(-1).tolist()}
            assert seen == {ROOT, *lineage(known, tokens[node])}
            assert depths[node] == len(seen) - 1
        scores = grown.score[request]
        kept = sorted(scores[token] for token in tokens[1:])
        assert kept == sorted(scores.values())[-len(kept) :]


@QUICK
@given(st.data(), st.integers(1, 6))
def test_a_tree_with_one_child_each_is_the_chain(data: st.DataObject, depth: int) -> None:
    shape = TreeShape(depth, 1, depth + 1)
    draw = st.lists(LOG_PROBS, min_size=1, max_size=1)
    tree = grow(shape, 2, lambda n: data.draw(draw)).tree
    chain = chain_tree(tree.token_BN)
    for field in dataclasses.fields(Tree):
        assert torch.equal(getattr(tree, field.name), getattr(chain, field.name)), field.name


def test_plain_decoding_is_the_root_alone() -> None:
    tree = chain_tree(torch.tensor([[7], [9]]))
    assert tree.token_BN.tolist() == [[7], [9]]
    assert tree.parent_BN.tolist() == [[-1], [-1]] and tree.depth_BN.tolist() == [[0], [0]]
    assert tree.visible_BNN.all() and tree.visible_BNN.shape == (2, 1, 1)


def test_equal_scores_keep_the_parent() -> None:
    """All log-probabilities 0: every candidate ties with its parent, and levels come in order."""
    shape = TreeShape(3, 2, 5)
    tree = grow(shape, 1, lambda n: [0.0] * n).tree
    assert tree.depth_BN[0].tolist() == [0, 1, 1, 2, 2]


def test_a_full_tree_keeps_everything() -> None:
    shape = TreeShape(3, 2, 11)
    grown = grow(shape, 1, lambda n: [-1.0, -2.0][:n])
    assert sorted(grown.tree.token_BN[0].tolist()) == list(range(11))


@QUICK
@given(st.data())
def test_tree_from_parents(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 9))
    parents = [-1] + [data.draw(st.integers(0, n - 1)) for n in range(1, num_nodes)]
    ancestors: list[set[int]] = []
    for node, parent in enumerate(parents):
        ancestors.append({node} | (ancestors[parent] if node else set()))
    depth = max(len(a) for a in ancestors) - 1
    token_1N = torch.arange(num_nodes)[None]
    tree = tree_from_parents(token_1N, torch.tensor([parents]), depth)
    for node, above in enumerate(ancestors):
        assert set(tree.visible_BNN[0, node].nonzero().view(-1).tolist()) == above
        assert int(tree.depth_BN[0, node]) == len(above) - 1


def random_tree(seed: int) -> Tree:
    """Two trees of 20 nodes with tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    parents = [
        [-1] + [int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, 20)]
        for _ in range(2)
    ]
    token_BN = torch.randint(0, 64, (2, 20), generator=generator)
    return tree_from_parents(token_BN, torch.tensor(parents), 19)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_path_alone_equals_the_trees_rows(seed: int) -> None:
    """Verified at once over paged prefixes of two requests, against one plain pass per path."""
    target, tree = tiny_target(), random_tree(seed)
    prompts, size = random_prompts([21, 34]), 8
    backend = fresh_backend(
        target.kv_layout, num_pages=10, page_size=size, num_slots=3, num_scratch_rows=20
    )
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed)) + NUM_RESERVED_PAGES
    table_BP = order.view(2, 5)
    length_B = torch.tensor([len(p) for p in prompts])
    with torch.inference_mode():
        chunks = [(0, len(p)) for p in prompts]
        prefill = backend.plan_prefill(
            page_table_BP=table_BP, chunks=chunks, device=torch.device("cpu")
        )
        flat, positions = sum(prompts, []), [i for p in prompts for i in range(len(p))]
        target.forward(torch.tensor(flat), torch.tensor(positions), prefill)
        plan = backend.plan_tree(
            page_table_BP=table_BP,
            slots_B=torch.tensor([2, 0]),
            first_index=0,
            end_index_B=length_B,
            visible_BQN=tree.visible_BNN,
            first_node=0,
            max_kv_len=64,
        )
        position_T = (length_B[:, None] + tree.depth_BN).flatten()
        hidden_TH = target.forward(tree.token_BN.flatten(), position_T, plan).hidden_TH
    rows = hidden_TH.view(2, 20, -1)
    for request, node in itertools.product(range(2), range(20)):
        seen = tree.visible_BNN[request, node].nonzero().view(-1)  # ascending: root to node
        path = tree.token_BN[request, seen].tolist()
        alone, _ = full_forward(target, prompts[request] + path)
        torch.testing.assert_close(rows[request, node], alone.hidden_TH[-1], atol=1e-4, rtol=1e-4)
