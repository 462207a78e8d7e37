"""Wrapper gaps, and the methods that close them."""

import ast

GET = "get_embed_and_head"
SET = "set_eagle3_layers_to_capture"

WRAPPER = """
class TestedForConditionalGeneration(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.vision = nn.Linear(1, 1)
        self.language_model = LlamaForCausalLM(config)
    def forward(self, ids):
        return self.language_model(ids)
EntryClass = TestedForConditionalGeneration
"""


def test_a_wrapper_gap(audited):
    seen = audited(WRAPPER)
    cls = seen.cls("TestedForConditionalGeneration")
    assert [(f.member, f.kind, f.in_inner) for f in cls.findings] == [
        (GET, "missing", True),
        (SET, "missing", True),
    ]
    assert cls.findings[0].message == (
        f"lacks {GET}; its inner model self.language_model (LlamaForCausalLM) has it"
    )
    assert cls.findings[0].location == "sglang/srt/models/tested.py:6"


def test_the_printed_methods_close_the_gap(audited):
    """What is printed is pasted into the class, and nothing is missing any more."""
    fixes = audited(WRAPPER).cls("TestedForConditionalGeneration").fixes
    assert [f.member for f in fixes] == [GET, SET, "set_embed_and_head"]
    assert ast.unparse(ast.parse("class A:\n" + fixes[1].source)).splitlines()[1:] == [
        "",
        f"    def {SET}(self, layer_ids=None):",
        f"        return self.language_model.{SET}(layer_ids)",
    ]
    added = "\n\n".join(f.source for f in fixes)
    seen = audited(WRAPPER.replace("    def forward", f"{added}\n\n    def forward"))
    assert seen.cls("TestedForConditionalGeneration").verdict == "complete"
    assert seen.ids == set()


def test_every_kind_of_parameter_is_passed_on(audited):
    seen = audited(f"""
        class InnerForCausalLM(LlamaForCausalLM):
            lm_head = 1
            def {GET}(self, first, /, second=2, *rest, third, fourth: int = 4, **others):
                return 1
        class TestedForConditionalGeneration(nn.Module):
            def __init__(self, config): self.language_model = InnerForCausalLM(config)
        EntryClass = TestedForConditionalGeneration
    """)
    fixes = {f.member: f.source for f in seen.cls("TestedForConditionalGeneration").fixes}
    assert fixes[GET] == (
        f"    def {GET}(self, first, /, second=2, *rest, third, fourth=4, **others):\n"
        f"        return self.language_model.{GET}"
        "(first, second, *rest, third=third, fourth=fourth, **others)"
    )
    assert fixes["lm_head"] == (
        "    @property\n    def lm_head(self):\n        return self.language_model.lm_head"
    )


def test_an_inner_model_without_it_is_no_gap(audited):
    seen = audited("""
        class InnerForCausalLM(nn.Module):
            def __init__(self): self.logits_processor = LogitsProcessor()
        class TestedForConditionalGeneration(nn.Module):
            def __init__(self): self.language_model = InnerForCausalLM()
        EntryClass = TestedForConditionalGeneration
    """)
    cls = seen.cls("TestedForConditionalGeneration")
    assert [f.in_inner for f in cls.findings] == [False, False]
    assert cls.fixes == ()


def test_several_inner_classes_are_told_apart(audited):
    seen = audited(f"""
        class PlainForCausalLM(nn.Module):
            def __init__(self, config): self.logits_processor = LogitsProcessor(config)
            def {GET}(self): return self.pair
        class TestedForConditionalGeneration(nn.Module):
            def __init__(self, config):
                if config.plain:
                    self.language_model = PlainForCausalLM(config)
                else:
                    self.language_model = LlamaForCausalLM(config)
        EntryClass = TestedForConditionalGeneration
    """)
    messages = [f.message for f in seen.cls("TestedForConditionalGeneration").findings]
    assert "(LlamaForCausalLM, PlainForCausalLM) has it" in messages[0]
    assert "(LlamaForCausalLM) has it, PlainForCausalLM has not" in messages[1]


def test_a_bare_decoder_is_not_delegated_to(audited):
    """Its setter alone does not help: the class around it must unpack what was captured."""
    seen = audited(f"""
        class Decoder(nn.Module):
            def {SET}(self, ids): self.ids = ids
            def forward(self): return self.ids
        class TestedForConditionalGeneration(nn.Module):
            def __init__(self, config):
                self.model = Decoder()
                self.logits_processor = LogitsProcessor(config)
            def {GET}(self): return self.pair
        EntryClass = TestedForConditionalGeneration
    """)
    cls = seen.cls("TestedForConditionalGeneration")
    (finding,) = cls.findings
    assert finding.in_inner
    assert "bare decoder" in finding.message
    assert cls.fixes == ()


def test_a_wrapper_of_a_wrapper(audited):
    """The nearer model has nothing, so that the path leads to the one which has it."""
    seen = audited("""
        class Thinker(nn.Module):
            def __init__(self, config): self.language_model = LlamaForCausalLM(config)
        class TestedForConditionalGeneration(nn.Module):
            def __init__(self, config): self.thinker = Thinker(config)
        EntryClass = TestedForConditionalGeneration
    """)
    cls = seen.cls("TestedForConditionalGeneration")
    assert cls.role == "target"
    assert cls.inner is not None
    assert cls.inner.path == "thinker.language_model"
    assert f"self.thinker.language_model.{GET}()" in cls.fixes[0].source


def test_optional_members_are_no_findings(audited):
    seen = audited("""
        class TestedForCausalLM(LlamaForCausalLM):
            set_embed_and_head = None
        EntryClass = TestedForCausalLM
    """)
    assert seen.state("TestedForCausalLM", "set_embed_and_head") == "stub"
    assert seen.ids == set()
