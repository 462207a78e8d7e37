"""Each way in which a pair can be bad is named, all of them together in under five seconds."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints import (
    DraftShape,
    TargetShape,
    stored_tensors,
    write_draft,
    write_target,
    write_weights,
)
from torch import Tensor

from eyas.config import EngineConfig
from eyas.engine.check import CheckReport, run_check
from eyas.types import Severity

Change = Callable[[Path], dict[str, Any] | None]
BUDGET = 1 << 34


def draft(shape: DraftShape | None = None, **config: Any) -> Change:
    """A draft of this shape, with these keys in its config.json."""
    return lambda folder: write_draft(folder / "draft", shape, config=config) and None


def target(shape: TargetShape | None = None, **config: Any) -> Change:
    """A target of this shape, with these keys in its config.json."""
    return lambda folder: write_target(folder / "target", shape, config=config) and None


def tensors(side: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    """A side whose stored tensors are changed."""

    def apply(folder: Path) -> None:
        shape = DraftShape()
        stored = write_target(folder / "target") if side == "target" else {}
        if side == "draft":
            stored = stored_tensors(shape, write_draft(folder / "draft", shape))
        write_weights(folder / side, change(stored))

    return apply


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda stored: {key: value for key, value in stored.items() if key != name}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    return lambda stored: stored | {name: change(stored[name])}


def file(side: str, change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Change:
    """A side one of whose files is damaged."""

    def apply(folder: Path) -> None:
        path = folder / side / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def shifted_offsets(raw: bytes) -> bytes:
    """The first tensor's range, moved on by four bytes."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    first = next(entry for name, entry in header.items() if name != "__metadata__")
    first["data_offsets"] = [offset + 4 for offset in first["data_offsets"]]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[end:]


def eagle1(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {k: v for k, v in stored.items() if k.startswith("midlayer.") and "hidden_" not in k}
    return kept | {"fc.weight": torch.zeros(64, 128), "embed_tokens.weight": torch.zeros(256, 64)}


def fp8(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return stored | {
        k: v.to(torch.float8_e4m3fn) for k, v in stored.items() if k.endswith("_proj.weight")
    }


def settings(**values: Any) -> Change:
    return lambda folder: dict(values)


def removed(side: str) -> Change:
    return lambda folder: {side: str(folder / "nowhere")}


# What is bad: (how, the code of the finding, its subject).
BAD: dict[str, tuple[Change, str, str]] = {
    "target width": (draft(DraftShape(target_hidden_size=32)), "target-width", "pair"),
    "fc width": (tensors("draft", replaced("fc.weight", lambda w: w[:, :150])), "fc-width", "pair"),
    "states and ids": (draft(DraftShape(layer_ids=(1, 3))), "fc-width", "pair"),
    "narrow draft": (draft(DraftShape(hidden_size=48)), "embedding-narrower", "pair"),
    "vocabulary too short": (
        draft(DraftShape(has_embedding=True, vocab_size=200)),
        "embedding-too-short",
        "pair",
    ),
    "no map": (draft(DraftShape(has_map=False)), "vocab-map-missing", "pair"),
    "map of another size": (
        tensors("draft", replaced("d2t", lambda d: d[:90])),
        "vocab-map-size",
        "draft",
    ),
    "map beyond the vocabulary": (
        tensors("draft", replaced("d2t", lambda d: d + 200)),
        "vocab-map-out-of-range",
        "pair",
    ),
    "map of absolute ids": (
        tensors("draft", replaced("d2t", lambda d: d + torch.arange(len(d)))),
        "vocab-map-absolute",
        "draft",
    ),
    "map out of order": (
        tensors("draft", replaced("d2t", lambda d: d.flip(0))),
        "vocab-map-not-ascending",
        "draft",
    ),
    "map as floats": (
        tensors("draft", replaced("d2t", lambda d: d.to(torch.bfloat16))),
        "vocab-map-dtype",
        "draft",
    ),
    "maps that disagree": (
        tensors("draft", replaced("t2d", lambda t: t.roll(1))),
        "vocab-maps-disagree",
        "draft",
    ),
    "layer beyond the target": (
        draft(DraftShape(layer_ids=(1, 3, 40))),
        "boundaries-out-of-range",
        "pair",
    ),
    "layer named twice": (draft(DraftShape(layer_ids=(3, 3, 4))), "boundaries-repeated", "pair"),
    "layers not ascending": (
        draft(DraftShape(layer_ids=(4, 3, 1))),
        "boundaries-not-ascending",
        "pair",
    ),
    "no layers named": (draft(DraftShape(num_states=4)), "layer-ids-missing", "pair"),
    "target of six layers": (target(TargetShape(num_layers=6)), "boundaries-repeated", "pair"),
    "lying layer count": (target(num_hidden_layers=9), "layer-count", "target"),
    "missing tensor": (
        tensors("target", without("model.layers.3.mlp.up_proj.weight")),
        "tensors-missing",
        "target",
    ),
    "missing tensor of the draft": (
        tensors("draft", without("midlayer.hidden_norm.weight")),
        "tensors-missing",
        "draft",
    ),
    "tensor left over": (
        tensors("target", lambda s: s | {"model.layers.0.mlp.gate.weight": torch.ones(1)}),
        "tensors-left-over",
        "target",
    ),
    "unknown tensor of the draft": (
        tensors("draft", lambda s: s | {"verifier.weight": torch.ones(1)}),
        "draft-unknown-tensors",
        "draft",
    ),
    "wrong shape": (
        tensors("target", replaced("model.norm.weight", lambda w: w[:-1])),
        "tensors-wrong-shape",
        "target",
    ),
    "wrong dtype": (
        tensors("draft", replaced("lm_head.weight", lambda w: w.to(torch.int8))),
        "tensors-wrong-dtype",
        "draft",
    ),
    "quantized target": (
        lambda folder: (
            write_weights(
                folder / "target",
                fp8(
                    write_target(
                        folder / "target",
                        config={"quantization_config": {"quant_method": "fp8"}},
                    )
                ),
            )
            and None
        ),
        "quantized-weights",
        "target",
    ),
    "no head": (tensors("target", without("lm_head.weight")), "head-missing", "target"),
    "no target": (removed("model"), "target-not-found", "target"),
    "no draft": (removed("draft"), "draft-not-found", "draft"),
    "EAGLE-1 draft": (tensors("draft", eagle1), "draft-kind-eagle1", "draft"),
    "P-EAGLE draft": (draft(architectures=["PEagleDraftModel"]), "draft-kind-peagle", "draft"),
    "unknown option": (draft(norm_after_fc=True), "draft-option-unknown", "draft"),
    "unsupported architecture": (
        target(architectures=["BloomForCausalLM"]),
        "unsupported-architecture",
        "target",
    ),
    "unknown rope": (target(rope_scaling={"type": "longrope"}), "config-wrong-value", "target"),
    "missing key": (target(hidden_size=...), "config-missing-key", "target"),
    "no JSON": (file("draft", lambda raw: raw[:-1], "config.json"), "config-unreadable", "draft"),
    "broken header": (
        file("target", lambda raw: raw[:9] + b"x" + raw[10:]),
        "weights-broken",
        "target",
    ),
    "truncated file": (file("draft", lambda raw: raw[:-1]), "weights-broken", "draft"),
    "bytes after the last tensor": (
        file("target", lambda raw: raw + b"\0"),
        "weights-broken",
        "target",
    ),
    "shifted offsets": (file("draft", shifted_offsets), "weights-broken", "draft"),
    "pointer instead of weights": (
        file("target", lambda raw: b"version https://git-lfs.github.com/spec/v1\nsize 1\n"),
        "weights-broken",
        "target",
    ),
    "too long": (settings(max_model_len=513), "model-length", "settings"),
    "window": (draft(sliding_window=128), "sliding-window", "draft"),
    "no memory for the weights": (settings(budget=1_000_000), "memory-weights", "device"),
    "no memory for the length": (settings(budget=4_000_000, max_model_len=512), "memory", "device"),
}


# Their messages say what to do, file by file and key by key.
SAY_IT_ALL = {"weights-broken", "config-unreadable", "config-wrong-value"}


def report(folder: Path, change: Change | None) -> tuple[CheckReport, float]:
    """The report on a good pair with one change, and the processor's seconds for the check."""
    write_target(folder / "target")
    write_draft(folder / "draft")
    asked = (change(folder) if change is not None else None) or {}
    budget = asked.pop("budget", BUDGET)
    paths = {"model": str(folder / "target"), "draft": str(folder / "draft")}
    config = EngineConfig(**(paths | {"device": "cpu"} | asked))
    start = time.process_time()
    found = run_check(config, budget_bytes=budget)
    return found, time.process_time() - start


def test_the_pair_is_good_before_the_change(tmp_path: Path) -> None:
    assert report(tmp_path, None)[0].findings == ()


def test_every_bad_pair_is_named_within_five_seconds(tmp_path: Path) -> None:
    """By one error: what follows from a fault is not told as a fault of its own."""
    wrong, seconds = {}, 0.0
    for name, (change, code, subject) in BAD.items():
        found, spent = report(tmp_path / name.replace(" ", "-"), change)
        seconds += spent
        errors = found.of(Severity.ERROR)
        if {(error.code, error.subject) for error in errors} != {(code, subject)}:
            wrong[name] = errors
        assert all(error.message for error in errors)
        assert code in SAY_IT_ALL or all(error.hint for error in errors)
    assert not wrong
    assert seconds < 5
