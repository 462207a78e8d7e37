"""The table, and the account of one class."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from eyas.audit import AuditError, AuditReport, explain, render_table

SOURCE = """
class PlainModel(nn.Module):
    def forward(self, hidden): return hidden
class DeadForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        self.model = PlainModel()
        self.logits_processor = LogitsProcessor(config)
class NothingForCausalLM(nn.Module): pass
class WrappingForConditionalGeneration(nn.Module):
    def __init__(self, config): self.language_model = LlamaForCausalLM(config)
class DynamicForConditionalGeneration(nn.Module):
    def __init__(self, config): self.language_model = LlamaForCausalLM(config)
    def __getattr__(self, name): return getattr(self.language_model, name)
class LlamaForCausalLMEagle3(nn.Module): pass
EntryClass = [
    DeadForCausalLM,
    NothingForCausalLM,
    WrappingForConditionalGeneration,
    DynamicForConditionalGeneration,
    LlamaForCausalLMEagle3,
]
"""


def shown(report: AuditReport, *, width: int = 60, terminal: bool = False) -> str:
    out = io.StringIO()
    render_table(report, Console(file=out, width=width, force_terminal=terminal, no_color=True))
    return out.getvalue()


def test_the_table(audited):
    text = shown(audited(SOURCE).report)
    rows = [line.split(maxsplit=1) for line in text.splitlines()]
    names = [row[0] for row in rows if row and row[0].endswith(("CausalLM", "Generation"))]
    assert names == [
        "DeadForCausalLM",
        "WrappingForConditionalGeneration",
        "DynamicForConditionalGeneration",
        "NothingForCausalLM",
    ]
    by_name = {row[0]: " ".join(row[-1].split()) for row in rows if row}
    assert by_name["DeadForCausalLM"] == "yes captures nothing get_input_embeddings"
    assert by_name["WrappingForConditionalGeneration"] == (
        "inner model only inner model only set_embed_and_head, get_input_embeddings"
    )
    assert by_name["DynamicForConditionalGeneration"] == "dynamic dynamic -"
    assert by_name["language_model:"] == "LlamaForCausalLM"
    assert (
        "  DeadForCausalLM: set_eagle3_layers_to_capture captures nothing over PlainModel: " in text
    )
    assert "Without any of the interface, in an inner model either (1):" in text
    assert "        return self.language_model.get_embed_and_head()" in text
    assert "return self.language_model.set_embed_and_head(" not in text
    assert (
        "sglang (version unknown): 6 exported classes, 5 of them generation models: "
        "1 complete, 1 undecided, 3 with findings (5 findings)." in text
    )


def test_the_table_fits_a_narrow_terminal(audited):
    text = shown(audited(SOURCE).report, width=80, terminal=True)
    lines = Text.from_ansi(text).plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert "WrappingForConditionalGeneration " in text
    assert "optional methods missing" not in text


def test_files_that_cannot_be_read_are_listed(audited):
    text = shown(audited("", broken="def").report)
    assert "sglang/srt/models/broken.py:5: not Python 3." in text
    assert "sglang (version unknown): 1 exported classes" in text


def test_one_class_with_file_and_line(audited):
    text = explain(audited(SOURCE).report, "DeadForCausalLM")
    for line in (
        "DeadForCausalLM (sglang), sglang/srt/models/tested.py:8",
        "  target: makes logits (holds a LogitsProcessor)",
        "    LlamaForCausalLM sglang/srt/models/llama.py:18",
        "    get_embed_and_head           present     required "
        "sglang/srt/models/llama.py:24, from LlamaForCausalLM",
        "  set_eagle3_layers_to_capture over PlainModel: captures nothing",
        "    sglang/srt/models/llama.py:31: sets layers_to_capture of PlainModel; "
        "never read by its forward",
        "  FINDING DeadForCausalLM:set_eagle3_layers_to_capture:dead-setter",
    ):
        assert line in text.splitlines()


def test_a_wrapper_is_explained_with_all_that_is_to_be_added(audited):
    text = explain(audited(SOURCE).report, "WrappingForConditionalGeneration")
    assert "inner model self.language_model, set at sglang/srt/models/tested.py:14" in text
    assert "    def set_embed_and_head(self, embed, head):" in text


def test_a_class_that_does_not_count_says_why(audited):
    text = explain(audited(SOURCE).report, "LlamaForCausalLMEagle3")
    assert '  draft: "Eagle" in its name' in text
    assert "FINDING" not in text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Nothing", "NothingForCausalLM"),
        ("WrappingForConditionalGeneratoin", "WrappingForConditionalGeneration"),
        ("llamaforcausallm", "LlamaForCausalLM"),
    ],
)
def test_an_unknown_class_suggests_near_names(audited, name, near):
    report = audited(SOURCE).report
    with pytest.raises(AuditError, match=f"no class {name}; did you mean .*{near}"):
        explain(report, name)
    with pytest.raises(AuditError, match="no class Xyzzy$"):
        explain(report, "Xyzzy")
