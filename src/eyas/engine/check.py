"""The contract check: all that can be wrong between target, draft, device and settings (D5).

It reads config.json, tensor headers and the small maps d2t and t2d, builds both models on the meta
device, and reports everything at once. No floating-point weight is read and nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.config import EngineConfig
from eyas.contract.attention import KVLayout
from eyas.contract.draft import Draft
from eyas.contract.target import Target, missing_members
from eyas.engine.check_behaviour import report_behaviour
from eyas.engine.check_coverage import report_coverage, report_vocab_maps
from eyas.engine.check_explain import ExplainedModel, explain
from eyas.engine.check_lengths import report_lengths
from eyas.engine.check_plan import describe_draft, describe_plan, describe_target, report_plan
from eyas.engine.check_report import CheckReport, Section
from eyas.engine.check_vision import describe_images, served_vision
from eyas.engine.check_weights import report_dtype
from eyas.engine.device import backends, memory_budget, resolve_device, resolve_dtype
from eyas.engine.memory_plan import MemoryNeed, MemoryPlan, plan_memory
from eyas.models.checkpoint import Checkpoint, CheckpointError, NoWeightsError
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.draft_config import inspect_draft
from eyas.models.findings import Findings
from eyas.models.quant_config import plain
from eyas.models.registry import target_class
from eyas.models.target_config import read_target_config
from eyas.models.weight_slots import WeightSlot, weight_slots
from eyas.types import CheckError, EyasError

__all__ = ["CheckReport", "run_check"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


def run_check(config: EngineConfig, *, budget_bytes: int | None = None) -> CheckReport:
    """Check that `config.model` and `config.draft` (local folders) can be served as configured.

    budget_bytes: memory to plan with instead of the device's own. Never raises on what is wrong
    with the files: the report says it (`CheckReport.ok`, `raise_on_errors`).
    """
    check = _Check(config, budget_bytes)
    return check.run()


@dataclasses.dataclass
class _Side:
    """One model as far as it could be read. weight_bytes: in the dtype that it will run in."""

    checkpoint: Checkpoint | None = None
    model: Any = None
    slots: dict[str, WeightSlot] = dataclasses.field(default_factory=dict)
    weight_bytes: int = 0


class _Check:
    """One run: steps that add findings and what later steps need."""

    def __init__(self, config: EngineConfig, budget_bytes: int | None) -> None:
        self.config = config
        self.budget_bytes = budget_bytes
        self.findings = Findings()
        self.facts: dict[str, str] = {}
        self.target_config: ModelConfig | None = None
        self.draft_config: DraftConfig | None = None
        self.target, self.draft = _Side(), _Side()
        self.device: str | None = None
        self.dtype = torch.float32
        self.need: MemoryNeed | None = None
        self.plan: MemoryPlan | None = None

    def run(self) -> CheckReport:
        """All steps, in the order in which a reader wants to hear of them."""
        start = time.perf_counter()
        self._check_device()
        self._check_target()
        if self.config.draft is not None:
            self._check_draft(self.config.draft)
        self._check_behaviour()
        self._check_memory()
        self._check_lengths()
        return CheckReport(
            findings=tuple(self.findings),
            target=self.target_config,
            draft=self.draft_config,
            plan=self.plan,
            facts=self.facts,
            sections=self._explain(),
            seconds=time.perf_counter() - start,
        )

    def _check_device(self) -> None:
        try:
            self.device = resolve_device(self.config.device)
        except EyasError as error:
            self.findings.error("device", "device-missing", str(error))

    def _check_target(self) -> None:
        folder = Path(self.config.model)
        try:
            self.target_config = read_target_config(folder)
        except CheckError as error:
            self.findings.extend(error.findings)
        if not folder.is_dir():
            return
        try:
            self.target.checkpoint = Checkpoint.open(folder)
        except NoWeightsError as error:
            self.findings.skip("target", "weights-missing", f"{error}: tensors were not checked")
        except CheckpointError as error:
            self.findings.error("target", "weights-broken", str(error))
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            self.findings.warn(
                "target",
                "tokenizer-missing",
                f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)})",
                "put the tokenizer's files beside the weights; text requests need them",
            )
        if self.target_config is not None:
            self._build_target(self.target_config)

    def _build_target(self, target: ModelConfig) -> None:
        checkpoint = self.target.checkpoint
        if checkpoint is not None and checkpoint.is_plain:
            target = plain(target)  # whatever config.json says
        takes_images = target.vision is not None
        self.target_config = target = served_vision(
            target, checkpoint, images=self.config.images, findings=self.findings
        )
        if takes_images:
            self.facts["images"] = describe_images(target)
        self.dtype = resolve_dtype(self.config, target, checkpoint)
        is_comparable = report_dtype("target", target, checkpoint, self.dtype, self.findings)
        self.facts["target"] = describe_target(target)
        try:
            model_class = target_class(target.architecture)
        except EyasError as error:
            self.findings.error("target", "unsupported-architecture", str(error))
            return
        self.target.model = self._build("target", model_class, target, interface=Target)
        if self.target.model is not None:
            self._measure(self.target)
            if is_comparable:
                ignored = report_coverage(
                    "target", self.target.model, checkpoint, self.findings, slots=self.target.slots
                )
                if ignored:
                    self.facts["not read"] = ignored

    def _check_draft(self, folder: str) -> None:
        from eyas.models.eagle3 import Eagle3Draft

        reading = inspect_draft(
            folder,
            self.target_config,
            boundaries=self.config.draft_boundaries,
            norm_output=self.config.draft_norm_output,
        )
        self.findings.extend(reading.findings)
        self.draft_config, self.draft.checkpoint = reading.config, reading.checkpoint
        if self.target_config is None:
            self.findings.skip(
                "pair", "target-unreadable", "how draft and target fit together was not checked"
            )
        report_vocab_maps(reading.checkpoint, self.target_config, self.findings)
        draft = reading.config
        if draft is None:
            return
        checkpoint = reading.checkpoint
        is_comparable = report_dtype("draft", draft.decoder, checkpoint, self.dtype, self.findings)
        if self.config.topk > draft.draft_vocab_size:
            self.findings.error(
                "settings",
                "topk-above-draft-vocabulary",
                f"--topk {self.config.topk} asks for more candidates than the draft's vocabulary "
                f"has tokens ({draft.draft_vocab_size})",
                f"use --topk {draft.draft_vocab_size} or less",
            )
        self.facts["draft"] = describe_draft(draft)
        self.facts["boundaries"] = f"{list(draft.boundaries)}: {draft.boundary_rule}"
        self.draft.model = self._build("draft", Eagle3Draft, draft, interface=Draft)
        if self.draft.model is not None:
            self._measure(self.draft)
            if is_comparable:
                report_coverage(
                    "draft", self.draft.model, checkpoint, self.findings, slots=self.draft.slots
                )

    def _build(
        self, subject: str, model_class: Any, config: Any, *, interface: type
    ) -> nn.Module | None:
        """The module tree without memory; None, with a finding, if it cannot be built or lacks
        part of its interface."""
        missing = missing_members(model_class, interface)
        if missing:
            self.findings.error(
                subject,
                "interface-members-missing",
                f"{model_class.__name__} lacks {', '.join(missing)}",
                f"add them: contract.{interface.__name__} declares what speculation needs",
            )
            return None
        try:
            # One position: the rotary table is no weight, and a long one takes seconds.
            model: nn.Module = model_class(config, dtype=self.dtype, device="meta", max_model_len=1)
        except (EyasError, ValueError, NotImplementedError) as error:
            self.findings.error(subject, "model-cannot-be-built", str(error))
            return None
        return model

    def _measure(self, side: _Side) -> None:
        side.slots = weight_slots(side.model)
        side.weight_bytes = sum(
            math.prod(slot.shape) * slot.dtype.itemsize for slot in side.slots.values()
        )

    def _check_lengths(self) -> None:
        """After the memory plan, which may have cut the length that will be served."""
        target, asked, plan = self.target_config, self.config.max_model_len, self.plan
        if target is None:
            return
        served = plan.max_model_len if plan is not None and plan.fits else None
        self.facts["positions"] = report_lengths(
            target,
            self.draft_config,
            asked=asked,
            served=served or asked or target.max_position_embeddings,
            findings=self.findings,
        )

    def _explain(self) -> tuple[Section, ...]:
        sides = []
        if self.target_config is not None:
            sides.append(("target", self.target_config, self.target))
            if self.draft_config is not None:
                sides.append(("draft", self.draft_config.decoder, self.draft))
        models = [
            ExplainedModel(role, config, side.model, side.checkpoint, side.slots)
            for role, config, side in sides
        ]
        if not models:
            return ()
        return explain(models, self.draft_config, self.need, self.plan, self.device)

    def _check_behaviour(self) -> None:
        target = self.target_config
        # Of classes that were built, and boundaries that can be captured: the rest was reported.
        if target is None or self.target.model is None:
            return
        draft = self.draft_config if self.draft.model is not None else None
        if any(finding.code.startswith("boundaries-") for finding in self.findings.errors):
            draft = None
        report_behaviour(type(self.target.model), target, draft, self.findings)

    def _check_memory(self) -> None:
        target, device = self.target_config, self.device
        if target is None or device is None or self.target.model is None:
            return
        if self.config.draft is not None and self.draft.model is None:
            return  # half a plan would be wrong
        self.facts["device"] = f"{device}, {str(self.dtype).removeprefix('torch.')}"
        self.facts["backends"] = "; ".join(f"{k}: {v}" for k, v in backends(device).items())
        tree = self.config.tree_shape()
        shape = "chain" if tree.is_chain else "tree"
        self.facts["round"] = (
            f"{shape} of {tree.num_nodes} nodes, depth {tree.depth}" if tree.depth else "plain"
        )
        self.need = need = MemoryNeed(
            target=target,
            draft=self.draft_config,
            target_weight_bytes=self.target.weight_bytes,
            draft_weight_bytes=self.draft.weight_bytes,
            packed_bytes=self._packed_bytes(device),
            target_layout=self.target.model.kv_layout,
            draft_layout=self._draft_layout(),
            dtype=self.dtype,
            tree=tree,
            page_size=self.config.page_size,
            max_batch_size=self.config.max_batch_size,
            prefill_chunk_tokens=self.config.prefill_chunk_tokens,
            default_model_len=target.max_position_embeddings,
            max_model_len=self.config.max_model_len,
            kv_cache_tokens=self.config.kv_cache_tokens,
        )
        budget = self.budget_bytes if self.budget_bytes is not None else memory_budget(device)
        self.plan = plan_memory(need, budget_bytes=budget)
        report_plan(need, self.plan, self.findings)
        self.facts["memory"] = describe_plan(self.plan)

    def _draft_layout(self) -> KVLayout | None:
        layout: KVLayout | None = self.draft.model.kv_layout if self.draft.model else None
        return layout

    def _packed_bytes(self, device: str) -> int:
        """Second copies on a CPU: a packed head beside an embedding that is still looked up, and
        the draft's own packed copy of a head that it shares with the target."""
        assert self.target_config is not None
        target, draft = self.target_config, self.draft_config
        if device != "cpu":
            return 0
        head_bytes = target.vocab_size * target.hidden_size * self.dtype.itemsize
        shares_head = draft is not None and not draft.has_head
        return head_bytes * (target.tie_word_embeddings + shares_head)
