"""Small packages that are laid out like another engine's, and what the audit makes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from eyas.audit import AuditReport, ClassReport, audit

# A complete model: the setter reaches an attribute that the layer loop reads.
LLAMA = """
    from torch import nn
    from sglang.srt.layers.logits_processor import LogitsProcessor

    class LlamaModel(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.layers_to_capture = []

        def forward(self, hidden):
            captured = []
            for number, layer in enumerate(self.layers):
                if number in self.layers_to_capture:
                    captured.append(hidden)
                hidden = layer(hidden)
            return hidden, captured

    class LlamaForCausalLM(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.model = LlamaModel(config)
            self.logits_processor = LogitsProcessor(config)

        def get_embed_and_head(self):
            return self.model.embed_tokens.weight, self.lm_head.weight

        def set_embed_and_head(self, embed, head):
            self.lm_head.weight = head

        def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None):
            self.model.layers_to_capture = [i + 1 for i in layer_ids]

        def forward(self, hidden):
            return self.logits_processor(self.model(hidden))

    EntryClass = LlamaForCausalLM
"""
HEAD = """
    from torch import nn
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
"""

MakeTree = Callable[..., Path]


@pytest.fixture
def sglang_tree(tmp_path: Path) -> MakeTree:
    """Writes `sglang/srt/models/<name>.py` for each keyword, with the complete llama beside them.

    Sources of models begin with the imports of `HEAD`.
    """

    def make(**sources: str) -> Path:
        models = tmp_path / "sglang/srt/models"
        models.mkdir(parents=True, exist_ok=True)
        (models / "llama.py").write_text(dedent(LLAMA))
        for name, source in sources.items():
            (models / f"{name}.py").write_text(dedent(HEAD) + dedent(source))
        return tmp_path

    return make


@dataclass(frozen=True)
class Seen:
    """A report, with short ways to ask it."""

    report: AuditReport

    def cls(self, name: str) -> ClassReport:
        """The one report on a class."""
        (found,) = [c for c in self.report.classes if c.name == name]
        return found

    def state(self, name: str, member: str) -> str:
        """The state of one member of a class."""
        (found,) = [m.state for m in self.cls(name).members if m.name == member]
        return found

    def verdicts(self, name: str, method: str) -> dict[str, str]:
        """What a method does, by class of the inner model."""
        return {e.inner: e.verdict for e in self.cls(name).effects if e.method == method}

    @property
    def ids(self) -> set[str]:
        """Ids of all findings."""
        return {f.id for f in self.report.findings}


@pytest.fixture
def audited(sglang_tree: MakeTree) -> Callable[..., Seen]:
    """Audits a package of the complete llama, one module ("tested") and more by keyword."""

    def run(source: str, **more: str) -> Seen:
        return Seen(audit(sglang_tree(tested=source, **more), "sglang"))

    return run
