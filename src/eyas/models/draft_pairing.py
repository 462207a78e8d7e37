"""How a draft fits onto its target: widths, embedding, head, vocabulary and boundaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eyas.models.boundaries import (
    BoundaryChoice,
    default_boundaries,
    report_boundaries,
    translate_layer_ids,
)
from eyas.models.config import ModelConfig
from eyas.models.draft_source import DraftSource

_RIGHT_TARGET = "pair the draft with the target that it was trained on"
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """num_embeddings: rows of the embedding that the draft uses. tied_head: the head is that
    embedding. has_*: stored with the draft."""

    num_embeddings: int
    draft_vocab_size: int
    has_embedding: bool
    has_head: bool
    has_d2t: bool
    tied_head: bool


def read_target_width(source: DraftSource, target: ModelConfig | None) -> int:
    """Width of one captured state."""
    claimed = source.top.optional_integer("target_hidden_size")
    if target is None:
        return claimed or source.layer.integer("hidden_size")
    if claimed is not None and claimed != target.hidden_size:
        source.findings.error(
            "pair",
            "target-width",
            f"the draft was made for a target of hidden size {claimed}, this one has "
            f"{target.hidden_size}",
            _RIGHT_TARGET,
        )
        return claimed
    return target.hidden_size


def read_vocabulary(
    source: DraftSource, target: ModelConfig | None, *, target_width: int
) -> Vocabulary:
    """Embedding, head and map: stored, or shared with the target."""
    has_embedding, num_embeddings = _read_embedding(source, target, target_width=target_width)
    target_vocab = target.vocab_size if target else None
    has_head = not source.has_weights or "lm_head.weight" in source.stored
    tied = source.top.flag("tie_word_embeddings", False)
    if has_head:
        size = _own_head_rows(source, target_vocab, tied=tied)
    else:
        size = _shared_head_rows(source, target, num_embeddings=num_embeddings, tied=tied)
    if source.has_weights:
        has_d2t = "d2t" in source.stored
    else:
        has_d2t = target_vocab is not None and size != target_vocab
    return Vocabulary(
        num_embeddings=num_embeddings,
        draft_vocab_size=size,
        has_embedding=has_embedding,
        has_head=has_head,
        has_d2t=has_d2t,
        tied_head=tied and not has_head,
    )


def _read_embedding(
    source: DraftSource, target: ModelConfig | None, *, target_width: int
) -> tuple[bool, int]:
    """(whether the draft has its own, rows of the one that it uses)."""
    hidden_size = source.layer.integer("hidden_size")
    stored = source.size("embed_tokens.weight")
    target_vocab = target.vocab_size if target else None
    claimed = source.layer.optional_integer("vocab_size") or source.size("t2d")
    if stored is not None:
        own, made_for = True, source.layer_size("vocab_size", stored)
    else:
        # Without weight files: as the formats are written.
        target_width = target.hidden_size if target else target_width
        narrow = hidden_size != target_width
        own = not source.has_weights and (source.format == "speculators" or narrow)
        made_for = claimed or target_vocab or source.layer.integer("vocab_size")
        if narrow and not own:
            source.findings.error(
                "pair",
                "embedding-narrower",
                "the draft has no embedding and cannot share the target's: its hidden size is "
                f"{hidden_size}, the target's {target_width}",
                "export the draft with its embed_tokens.weight",
            )
    if own and target_vocab is not None and made_for < target_vocab:
        source.findings.error(
            "pair",
            "embedding-too-short",
            f"the draft's embedding has {made_for} rows, the target's vocabulary {target_vocab} "
            "tokens",
            _RIGHT_TARGET,
        )
    elif target_vocab is not None and made_for != target_vocab:
        source.findings.warn(
            "pair",
            "vocab-size-differs",
            f"the draft was made for a vocabulary of {made_for}, the target has {target_vocab}",
            "make sure that both use the same tokenizer",
        )
    return own, made_for if own else target_vocab or made_for


def _own_head_rows(source: DraftSource, target_vocab: int | None, *, tied: bool) -> int:
    """Rows of the draft's own head, compared with the config and the map."""
    rows, map_rows = source.size("lm_head.weight"), source.size("d2t")
    claimed = source.top.optional_integer("draft_vocab_size")
    size = rows or claimed or target_vocab or source.layer.integer("vocab_size")
    if rows is not None and claimed is not None and claimed != rows:
        source.contradict("draft_vocab_size", claimed, f"the head has {rows} rows")
    if rows is not None and tied:
        source.contradict("tie_word_embeddings", "true", "a head of its own is stored")
    if map_rows not in (None, size):
        source.findings.error(
            "draft",
            "vocab-map-size",
            f"the draft's head has {size} rows, its map d2t {map_rows} entries",
            "export head and map from the same draft vocabulary",
        )
    elif map_rows is None and source.has_weights and target_vocab not in (None, size):
        source.findings.error(
            "pair",
            "vocab-map-missing",
            f"the draft's vocabulary has {size} tokens, the target's {target_vocab}, and no d2t "
            "is stored to say which ones",
            "export the draft with its d2t (and t2d)",
        )
    return size


def _shared_head_rows(
    source: DraftSource, target: ModelConfig | None, *, num_embeddings: int, tied: bool
) -> int:
    """Rows of a head that is the target's or, tied, the embedding that the draft uses."""
    hidden_size = source.layer.integer("hidden_size")
    uses_own_embedding = tied and "embed_tokens.weight" in source.stored
    size = num_embeddings if tied or target is None else target.vocab_size
    wanted = source.size("d2t") or source.top.optional_integer("draft_vocab_size")
    if wanted not in (None, size):
        source.findings.error(
            "draft",
            "head-missing",
            f"the draft's vocabulary has {wanted} tokens and no lm_head.weight is stored; a shared "
            f"head has {size} rows",
            "export the draft with its lm_head.weight",
        )
    elif target is not None and not uses_own_embedding and hidden_size != target.hidden_size:
        source.findings.error(
            "pair",
            "head-missing",
            "the draft has no head and cannot share the target's: its hidden size is "
            f"{hidden_size}, the target's {target.hidden_size}",
            "export the draft with its lm_head.weight",
        )
    return size


def read_boundaries(
    source: DraftSource,
    target: ModelConfig | None,
    *,
    override: Sequence[int] | None,
    target_width: int,
) -> BoundaryChoice | None:
    """The target boundaries that fc reads, by the rule that fits; None if there is none."""
    ids = _layer_ids(source)
    num_states = _num_states(source, target_width)
    if target is None:
        return None
    num_layers = target.num_layers
    if override is not None:
        choice = BoundaryChoice(tuple(override), "given by --draft-boundaries")
    elif ids:
        choice = translate_layer_ids(ids, num_layers=num_layers, format=source.format)
    elif num_states in (None, 3):
        rule = f"no ids are stored: the default for {num_layers} layers"
        is_guess = source.format == "specforge"
        choice = BoundaryChoice(default_boundaries(num_layers), rule, is_guess=is_guess)
    else:
        source.findings.error(
            "pair",
            "layer-ids-missing",
            f"the draft reads {num_states} states of the target and its config.json does not say "
            "which",
            "name them with --draft-boundaries",
        )
        return None
    report_boundaries(choice.boundaries, num_layers=num_layers, findings=source.findings)
    _report_choice(source, choice, num_states=num_states, target_width=target_width)
    return choice


def _report_choice(
    source: DraftSource, choice: BoundaryChoice, *, num_states: int | None, target_width: int
) -> None:
    if num_states is not None and len(choice.boundaries) != num_states:
        width = source.size("fc.weight", 1)
        evidence = f"its fc has {width} columns" if width else "its config.json says so"
        source.findings.error(
            "pair",
            "fc-width",
            f"the draft reads {num_states} states of width {target_width} ({evidence}), but "
            f"{len(choice.boundaries)} boundaries are named: {list(choice.boundaries)}",
            f"name {num_states} with --draft-boundaries, or take the draft that fits",
        )
    if choice.is_guess:
        source.findings.warn(
            "pair",
            "boundaries-guessed",
            f"the draft reads boundaries {list(choice.boundaries)}: {choice.rule}",
            "if acceptance is low, try their neighbours with --draft-boundaries",
        )


def _num_states(source: DraftSource, target_width: int) -> int | None:
    """How many states fc reads, by its width; by the config where no fc is to be seen."""
    width = source.size("fc.weight", 1)
    if width is None:
        key = "num_aux_hidden_states"
        return source.top.optional_integer(key) or source.eagle.optional_integer(key)
    if width % target_width:
        source.findings.error(
            "pair",
            "fc-width",
            f"the draft's fc has {width} columns, which is no multiple of the target's hidden "
            f"size {target_width}",
            _RIGHT_TARGET,
        )
        return None
    return width // target_width


def _layer_ids(source: DraftSource) -> list[int]:
    """The stored ids; empty where they are absent, null or an empty list."""
    found = []
    for fields in (source.top, source.eagle):
        value = fields.data.get(_IDS)
        if value in (None, []):
            continue
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            fields.problems.append(f"{_IDS} must be a list of whole numbers, not {value!r}")
            continue
        found.append(value)
    if len(found) == 2 and found[0] != found[1]:
        source.findings.error(
            "draft",
            "draft-flags-disagree",
            f"{_IDS} is {found[0]} in config.json and {found[1]} in its eagle_config",
            "keep one of the two, or give --draft-boundaries",
        )
    return found[0] if found else []
