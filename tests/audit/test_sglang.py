"""SGLang: what is exported, and which classes count."""

import pytest


@pytest.mark.parametrize(
    ("name", "body", "role"),
    [
        ("AnyName", "self.logits_processor = LogitsProcessor(c)", "target"),
        ("AnyName", "self.text = LlamaForCausalLM(c)", "target"),
        ("AnyForCausalLM", "self.model = build(c)", "target"),
        ("AnyForConditionalGeneration", "self.model = build(c)", "target"),
        ("AnyForCausalLM", "self.pooler = Pooler()", "not generative"),
        ("AnyForSequenceClassification", "self.score = nn.Linear(1, 1)", "not generative"),
        ("AnyVisionModel", "self.patches = nn.Linear(1, 1)", "not generative"),
        ("LlamaForCausalLMEagle3", "self.logits_processor = LogitsProcessor(c)", "draft"),
        ("AnyForCausalLMNextN", "self.logits_processor = LogitsProcessor(c)", "draft"),
        ("AnyMTP", "self.logits_processor = LogitsProcessor(c)", "draft"),
        ("Any", "self.l = LogitsProcessor(c, return_full_logits=True)", "diffusion"),
    ],
)
def test_which_classes_count(audited, name, body, role):
    seen = audited(f"""
        from sglang.srt.layers.pooler import Pooler
        class {name}(nn.Module):
            def __init__(self, c):
                {body}
        EntryClass = {name}
    """)
    cls = seen.cls(name)
    assert cls.role == role
    assert cls.reason
    assert bool(cls.findings) == (role == "target")


@pytest.mark.parametrize(
    "export",
    [
        "EntryClass = First",
        "EntryClass = [First, Second]",
        "EntryClass = (First, Second)",
        "EntryClass = [First]\nEntryClass += [Second]",
        "if fast:\n    EntryClass = [First]\nelse:\n    EntryClass = [Second]",
        "CLASSES = [First, Second]\nEntryClass = CLASSES",
        "EntryClass: list = [First, Second]",
    ],
)
def test_ways_to_export(audited, export):
    seen = audited(f"class First(nn.Module): pass\nclass Second(nn.Module): pass\n{export}")
    names = {c.name for c in seen.report.classes} - {"LlamaForCausalLM"}
    assert names == ({"First"} if export.endswith("= First") else {"First", "Second"})


def test_modules_without_an_export_and_below_the_folder_are_no_models(audited, tmp_path):
    nested = tmp_path / "sglang/srt/models/common"
    nested.mkdir(parents=True)
    (nested / "__init__.py").write_text("class Deep: pass\nEntryClass = Deep")
    seen = audited("class NotExported(LlamaForCausalLM): pass")
    assert [c.name for c in seen.report.classes] == ["LlamaForCausalLM"]


def test_an_export_that_cannot_be_followed_is_a_finding(audited):
    seen = audited("from sglang.srt.models.lost import Lost\nEntryClass = [Lost]")
    assert seen.ids == {"sglang/srt/models/tested.py:unreadable"}
    assert "Lost" in seen.report.problems[0].message
