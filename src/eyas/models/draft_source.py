"""What a draft's folder says: its config.json by place, and its tensors by canonical name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from eyas.models.checkpoint import Checkpoint, TensorInfo
from eyas.models.config import DraftFormat
from eyas.models.config_file import Fields
from eyas.models.draft_flags import report_eagle_config, report_unknown_keys
from eyas.models.draft_kind import draft_format
from eyas.models.draft_names import canonical_name
from eyas.models.findings import Findings


@dataclasses.dataclass(frozen=True)
class DraftSource:
    """Claims (top: config.json; layer: the part that describes the decoder layer; eagle: its
    eagle_config) and facts (stored: tensors by canonical name, empty without weight files)."""

    folder: Path
    format: DraftFormat
    top: Fields
    layer: Fields
    eagle: Fields
    stored: dict[str, TensorInfo]
    has_weights: bool
    findings: Findings

    @classmethod
    def read(
        cls,
        data: dict[str, Any],
        folder: Path,
        *,
        checkpoint: Checkpoint | None,
        findings: Findings,
    ) -> DraftSource:
        """Sort a draft's files; reports unknown keys, unknown tensors and tensors stored twice."""
        format = draft_format(data)
        where = str(folder / "config.json")
        top = layer = Fields(data, where=where, subject="draft")
        eagle_config = top.section("eagle_config")
        eagle = Fields(eagle_config, where=f"{where}: eagle_config", subject="draft")
        if format == "speculators":
            key = "transformer_layer_config"
            layer = Fields(top.section(key), where=f"{where}: {key}", subject="draft")
        report_unknown_keys(data, findings, strict=format == "speculators")
        report_eagle_config(eagle_config, findings)
        stored = _by_canonical_name(checkpoint.tensors if checkpoint else {}, findings)
        has_weights = checkpoint is not None
        return cls(folder, format, top, layer, eagle, stored, has_weights, findings)

    def report_fields(self) -> bool:
        """Add what was missing or wrong in the files since the last call; whether there was any."""
        num_before = len(self.findings)
        for fields in dict.fromkeys((self.top, self.layer, self.eagle)):
            fields.report(self.findings)
        return len(self.findings) > num_before

    def size(self, name: str, dim: int = 0) -> int | None:
        """A stored tensor's extent along `dim`; None when it is not stored."""
        info = self.stored.get(name)
        return info.shape[dim] if info is not None and len(info.shape) > dim else None

    def layer_size(self, key: str, stored: int | None) -> int:
        """A size of the layer: what the tensors show, else what the config says."""
        if stored is None:
            return self.layer.integer(key)
        claimed = self.layer.optional_integer(key)
        if claimed not in (None, stored):
            self.contradict(key, claimed, f"the tensors show {stored}")
        return stored

    def has(self, *names: str, claimed: bool, key: str) -> bool:
        """Whether one of the tensors is stored; without weight files, what the config claims."""
        if not self.has_weights:
            return claimed
        present = any(name in self.stored for name in names)
        if claimed and not present:
            self.contradict(key, "true", f"no {names[0]} is stored")
        return present

    def contradict(self, key: str, claimed: object, truth: str) -> None:
        """Warn that a claim is overruled by the tensors."""
        self.findings.warn(
            "draft",
            "config-contradicted",
            f"config.json says {key} = {claimed}, but {truth}: the tensors decide",
            f"correct {key} in the draft's config.json",
        )


def _by_canonical_name(tensors: dict[str, TensorInfo], findings: Findings) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    unknown, twice = [], []
    for name, info in tensors.items():
        canonical = canonical_name(name)
        if canonical is None:
            unknown.append(name)
        elif canonical in found:
            twice.append(f"{found[canonical].name} and {name}")
        else:
            found[canonical] = info
    if unknown:
        findings.error(
            "draft",
            "draft-unknown-tensors",
            f"{len(unknown)} stored tensors belong to no known EAGLE-3 draft: "
            + ", ".join(sorted(unknown)[:8]),
            "this draft computes something that is not supported; nothing is left out silently",
        )
    if twice:
        findings.error(
            "draft", "draft-tensors-twice", f"the same tensor is stored as {'; '.join(twice)}"
        )
    return found
