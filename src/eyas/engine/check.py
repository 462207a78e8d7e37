"""The contract check: all that can be wrong between target, draft, device and settings (D5).

It reads config.json, tensor headers and the small maps d2t and t2d, builds both models on the meta
device, and reports everything at once. No floating-point weight is read and nothing is allocated.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from eyas.comm.group import Group
from eyas.config import EngineConfig
from eyas.contract.attention import KVLayout
from eyas.engine.check_behaviour import report_behaviour
from eyas.engine.check_build import Side, second_copies
from eyas.engine.check_coverage import report_coverage, report_vocab_maps
from eyas.engine.check_explain import ExplainedModel, explain
from eyas.engine.check_lengths import report_lengths
from eyas.engine.check_parallel import (
    Division,
    RankBytes,
    describe_ranks,
    divide,
    fitting_sizes,
    report_division,
    report_draft_division,
)
from eyas.engine.check_plan import (
    describe_draft,
    describe_plan,
    describe_target,
    report_end_tokens,
    report_plan,
)
from eyas.engine.check_report import CheckReport, Section, format_bytes
from eyas.engine.check_vision import describe_images, served_vision
from eyas.engine.check_weights import report_dtype
from eyas.engine.device import (
    backends,
    device_count,
    memory_budget,
    resolve_device,
    resolve_draft_dtype,
    resolve_dtype,
)
from eyas.engine.memory_plan import MemoryNeed, MemoryPlan, plan_memory
from eyas.models.checkpoint import Checkpoint, CheckpointError, NoWeightsError
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.draft_config import inspect_draft
from eyas.models.findings import Findings
from eyas.models.quant_config import plain
from eyas.models.registry import target_class
from eyas.models.sharding import WHOLE, Parallel
from eyas.models.target_config import read_target_config
from eyas.types import CheckError, EyasError

__all__ = ["CheckReport", "run_check"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


def run_check(
    config: EngineConfig, *, budget_bytes: int | None = None, device_bytes: int | None = None
) -> CheckReport:
    """Check that `config.model` and `config.draft` (local folders) can be served as configured.

    budget_bytes: memory to plan with instead of the device's own. device_bytes: plan for devices
    that have as much, GPUs unless config.device is "cpu", whatever this machine has. Never raises
    on what is wrong with the files: the report says it (`CheckReport.ok`, `raise_on_errors`).
    """
    check = _Check(config, budget_bytes, device_bytes)
    return check.run()


class _Check:
    """One run: steps that add findings and what later steps need."""

    def __init__(
        self, config: EngineConfig, budget_bytes: int | None, device_bytes: int | None
    ) -> None:
        self.config = config
        self.budget_bytes, self.device_bytes = budget_bytes, device_bytes
        self.division: Division | None = None
        self.parallel = WHOLE
        self.findings = Findings()
        self.facts: dict[str, str] = {}
        self.target_config: ModelConfig | None = None
        self.draft_config: DraftConfig | None = None
        self.target, self.draft = Side(), Side()
        self.device: str | None = None
        self.dtype = self.draft_dtype = torch.float32
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
        if self.device_bytes is not None:
            self.device = "cpu" if self.config.device == "cpu" else "cuda"
            return
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
        self.dtype = resolve_dtype(self.config, target, checkpoint)
        self.draft_dtype = resolve_draft_dtype(self.config, self.dtype)
        self.division = divide(
            target,
            num_ranks=self.config.tensor_parallel_size,
            expert_parallel=self.config.expert_parallel,
        )
        self.parallel = self.division.parallel
        is_comparable = report_dtype("target", target, checkpoint, self.dtype, self.findings)
        self.facts["target"] = describe_target(target)
        if takes_images:
            self.facts["images"] = describe_images(target)
        report_end_tokens(target, self.findings)
        try:
            model_class = target_class(target.architecture)
        except EyasError as error:
            self.findings.error("target", "unsupported-architecture", str(error))
            return
        self.target.build(
            "target",
            model_class,
            target,
            dtype=self.dtype,
            parallel=self.parallel,
            findings=self.findings,
        )
        if self.target.model is not None and is_comparable:
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
        is_comparable = report_dtype(
            "draft", draft.decoder, checkpoint, self.draft_dtype, self.findings
        )
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
        self.draft.build(
            "draft",
            Eagle3Draft,
            draft,
            dtype=self.draft_dtype,
            parallel=self.parallel,
            findings=self.findings,
        )
        if self.draft.model is not None and is_comparable:
            report_coverage(
                "draft", self.draft.model, checkpoint, self.findings, slots=self.draft.slots
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
        self.facts["device"] = self._describe_device(device)
        self.facts["backends"] = "; ".join(f"{k}: {v}" for k, v in backends(device).items())
        tree = self.config.tree_shape()
        shape = "chain" if tree.is_chain else "tree"
        self.facts["round"] = (
            f"{shape} of {tree.num_nodes} nodes, depth {tree.depth}" if tree.depth else "plain"
        )
        copies = second_copies(
            target,
            self.draft_config,
            dtype=self.dtype,
            draft_dtype=self.draft_dtype,
            parallel=self.parallel,
        )
        self.need = need = MemoryNeed(
            target=target,
            draft=self.draft_config,
            target_weight_bytes=self.target.weight_bytes,
            draft_weight_bytes=self.draft.weight_bytes + copies.converted,
            packed_bytes=copies.packed if device == "cpu" else 0,
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
            draft_dtype=self.draft_dtype,
            parallel=self.parallel,
        )
        budget = self.budget_bytes
        if budget is None:
            budget = memory_budget(
                device,
                num_ranks=self.config.tensor_parallel_size,
                device_bytes=self.device_bytes,
            )
        self._check_division(device, budget)
        if self.division is not None and self.division.undivided:
            return  # a plan for another number of ranks would be wrong
        self.plan = plan_memory(need, budget_bytes=budget)
        report_plan(
            need,
            self.plan,
            self.findings,
            fitting=lambda: self._fitting(budget),
            device_bytes=self.device_bytes,
        )
        self.facts["memory"] = describe_plan(self.plan)

    def _describe_device(self, device: str) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.draft_dtype)]
        text = f"{device}, {names[0]}"
        if self.draft.model is not None and names[0] != names[1]:
            text += f" (draft {names[1]})"
        if self.device_bytes is not None:
            text += f", planned for {format_bytes(self.device_bytes)} each, headroom left out"
        return text

    def _check_division(self, device: str, budget: int | None) -> None:
        target, division = self.target_config, self.division
        assert target is not None and division is not None
        report_division(
            division,
            target,
            expert_parallel=self.config.expert_parallel,
            num_devices=None if self.device_bytes is not None else device_count(device),
            fitting=None if budget is None else lambda: self._fitting(budget),
            findings=self.findings,
        )
        if division.undivided or division.asked == 1:
            return
        self.facts["ranks"] = describe_ranks(target, self.draft_config, self.parallel)
        if self.draft_config is not None:
            report_draft_division(self.draft_config, self.parallel, self.findings)

    def _fitting(self, budget: int | None) -> list[int]:
        """Numbers of ranks above the one that was asked for, or of all where that does not divide
        the model, with which the plan fits."""
        need, division = self.need, self.division
        assert need is not None and division is not None and self.target_config is not None
        sizes = [n for n in division.sizes if division.undivided or n > division.asked]
        if not sizes or budget is None:
            return []
        if self.parallel.group.size == 1:  # what divides is seen on a model that is divided
            divided = Parallel(Group(0, sizes[0]), self.parallel.expert_parallel)
            both = [side.divided(divided) for side in (self.target, self.draft)]
        else:
            both = [self.target, self.draft]
        ranks = both[0].parallel.group.size
        target, draft = (
            None if side.model is None else RankBytes(side.weight_bytes, side.full_bytes, ranks)
            for side in both
        )
        assert target is not None
        return fitting_sizes(need, sizes, target=target, draft=draft, budget_bytes=budget)

    def _draft_layout(self) -> KVLayout | None:
        layout: KVLayout | None = self.draft.model.kv_layout if self.draft.model else None
        return layout
