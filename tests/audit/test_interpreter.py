"""Which class an attribute holds, in the ways that models of other engines write it."""

import pytest

WRAPPER = """
import functools
from sglang.srt.models import llama

TABLE = {"a": LlamaForCausalLM, "b": None}
SWITCH = LlamaForCausalLM if fast else None

def factory(config):
    return LlamaForCausalLM(config)

class Base(nn.Module):
    kind = LlamaForCausalLM
    def __init__(self, config, cls=LlamaForCausalLM, **kwargs):
        super().__init__()
        self.language_model = cls(config)

class TestedForConditionalGeneration(nn.Module):
    def __init__(self, config, cls=LlamaForCausalLM):
        super().__init__()
        self.language_model = LlamaForCausalLM(config)

    def build(self, config):
        return LlamaForCausalLM(config)

    @property
    def built(self):
        return LlamaForCausalLM(None)

EntryClass = TestedForConditionalGeneration
"""


@pytest.mark.parametrize(
    "statements",
    [
        "self.language_model = LlamaForCausalLM(config)",
        "self.language_model = llama.LlamaForCausalLM(config).to(dtype)",
        "self.language_model = cls(config)",
        "self.language_model = factory(config)",
        "self.language_model = self.build(config)",
        "self.language_model = self.built",
        "self.language_model = TABLE[config.kind](config)",
        "self.language_model = TABLE.get(config.kind)(config)",
        "self.language_model = SWITCH(config)",
        "kind = TABLE.get(config.kind, None)\nmodel = kind(config=config)\n"
        "self.language_model = model",
        "self.language_model = None\nif config.text:\n    self.language_model = llama.factory"
        "\n    self.language_model = LlamaForCausalLM(config)",
        "self.language_model = functools.partial(LlamaForCausalLM, quant=None)(config)",
        "from sglang.srt.models.llama import LlamaForCausalLM as Local\n"
        "self.language_model = Local(config)",
        "self.text = LlamaForCausalLM(config)\nself.language_model = self.text",
        "with something() as what:\n    self.language_model = LlamaForCausalLM(config)",
        "try:\n    self.language_model = LlamaForCausalLM(config)\nexcept ValueError:\n    raise",
        "for kind in [LlamaForCausalLM]:\n    self.language_model = kind(config)",
        "Base.__init__(self, config)",
        "self.language_model = (made := LlamaForCausalLM(config))",
        "if isinstance(config, dict):\n    kind = nn.Module\nelse:\n    kind = LlamaForCausalLM\n"
        "self.language_model = kind(config)",
        "self.language_model: nn.Module = LlamaForCausalLM(config)",
        "self.language_model = LlamaModel(config)\nself.language_model = LlamaForCausalLM(config)",
    ],
)
def test_ways_to_make_an_inner_model(audited, statements):
    body = "\n".join(f"        {line}" for line in statements.split("\n"))
    plain = "        self.language_model = LlamaForCausalLM(config)\n\n    def build"
    seen = audited(WRAPPER.replace(plain, f"{body}\n\n    def build"))
    inner = seen.cls("TestedForConditionalGeneration").inner
    assert inner is not None
    assert inner.path == "language_model"
    assert [c.name for c in inner.classes] == ["LlamaForCausalLM"]


def test_a_class_given_to_the_base_decides(audited):
    """Two wrappers share a base, and each has the inner class that it hands to `super()`."""
    seen = audited("""
        class OtherForCausalLM(nn.Module):
            def __init__(self): self.logits_processor = LogitsProcessor()
        class FirstForConditionalGeneration(nn.Module):
            def __init__(self, config, prefix="", text_cls=LlamaForCausalLM):
                self.language_model = text_cls(config)
        class SecondForConditionalGeneration(FirstForConditionalGeneration):
            def __init__(self, config):
                super().__init__(config, text_cls=OtherForCausalLM)
        class ThirdForConditionalGeneration(FirstForConditionalGeneration):
            def __init__(self, config):
                super().__init__(config, "prefix", OtherForCausalLM)
        EntryClass = [
            FirstForConditionalGeneration,
            SecondForConditionalGeneration,
            ThirdForConditionalGeneration,
        ]
    """)
    inner = {c.name[:5]: c.inner.classes[0].name for c in seen.report.targets if c.inner}
    assert inner == {
        "First": "LlamaForCausalLM",
        "Secon": "OtherForCausalLM",
        "Third": "OtherForCausalLM",
    }


@pytest.mark.parametrize(
    "source",
    [
        "def loop(x): return loop(x)\nclass TestedForCausalLM(nn.Module):\n"
        "    def __init__(self, x): self.model = loop(x)",
        "class TestedForCausalLM(nn.Module):\n"
        "    def __init__(self, x): self.model = TestedForCausalLM(x)",
        "class TestedForCausalLM(nn.Module):\n"
        "    def __init__(self, x): self.model = self.make(x)\n"
        "    def make(self, x): return self.make(x)",
        "A = B\nB = A\nclass TestedForCausalLM(A):\n    def __init__(self): self.model = B()",
        "class TestedForCausalLM(nn.Module):\n"
        "    def __init__(self, x):\n        while x: self.model = self.model.model",
        "VALUE = lambda: VALUE()\nclass TestedForCausalLM(nn.Module):\n"
        "    def __init__(self): self.model = VALUE()",
    ],
)
def test_recursion_ends(audited, source):
    seen = audited(f"{source}\nEntryClass = TestedForCausalLM")
    assert seen.cls("TestedForCausalLM").verdict != "complete"


def test_an_unknown_inner_class_is_left_open(audited):
    seen = audited("""
        from transformers import AutoModel
        class TestedForConditionalGeneration(nn.Module):
            def __init__(self, config): self.language_model = AutoModel.from_config(config)
        EntryClass = TestedForConditionalGeneration
    """)
    inner = seen.cls("TestedForConditionalGeneration").inner
    assert inner is not None
    assert (inner.path, inner.classes) == ("language_model", ())
