"""Presence of members: inherited, aliased, patched, conditional, dynamic, stubbed, unknown."""

import pytest

GET = "get_embed_and_head"
SET = "set_eagle3_layers_to_capture"


def test_a_complete_model_has_no_finding(audited):
    seen = audited("")
    assert seen.cls("LlamaForCausalLM").verdict == "complete"
    assert seen.state("LlamaForCausalLM", "set_embed_and_head") == "present"
    assert seen.state("LlamaForCausalLM", "start_layer") == "missing"
    assert seen.ids == set()


@pytest.mark.parametrize(
    "source",
    [
        "class Tested(LlamaForCausalLM): pass",
        "class Middle(LlamaForCausalLM): pass\nclass Tested(Middle): pass",
        "import sglang.srt.models.llama as other\nclass Tested(other.LlamaForCausalLM): pass",
        "Alias = LlamaForCausalLM\nclass Tested(Alias): pass",
        "class Mixin: pass\nclass Tested(Mixin, LlamaForCausalLM): pass",
        "Tested = LlamaForCausalLM",
    ],
)
def test_members_are_found_through_bases_and_aliases(audited, source):
    seen = audited(f"{source}\nEntryClass = [Tested]")
    assert {c.verdict for c in seen.report.targets} == {"complete"}


BARE = """
class TestedForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = LlamaModel(config)
        self.logits_processor = LogitsProcessor(config)
EntryClass = TestedForCausalLM
"""


@pytest.mark.parametrize(
    "addition",
    [
        f"TestedForCausalLM.{GET} = LlamaForCausalLM.{GET}",
        f"setattr(TestedForCausalLM, '{GET}', LlamaForCausalLM.{GET})",
    ],
)
def test_a_method_patched_on_at_module_level_counts(audited, addition):
    assert audited(BARE).state("TestedForCausalLM", GET) == "missing"
    seen = audited(f"{BARE}\n{addition}")
    assert seen.state("TestedForCausalLM", GET) == "present"
    assert seen.ids == {f"TestedForCausalLM:{SET}:missing"}


def test_a_method_taken_from_another_class_is_run_on_this_one(audited):
    seen = audited(f"""
        class TestedForCausalLM(nn.Module):
            {GET} = LlamaForCausalLM.{GET}
            {SET} = LlamaForCausalLM.{SET}
            def __init__(self, config):
                self.model = LlamaModel(config)
        EntryClass = TestedForCausalLM
    """)
    assert seen.verdicts("TestedForCausalLM", SET) == {"LlamaModel": "captures"}
    assert seen.ids == set()


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("if fast:\n  def M(self): return 1", "conditional"),
        ("if fast:\n  def M(self): return 1\nelse:\n  def M(self): return 2", "present"),
        ("try:\n  M = library.M\nexcept ImportError:\n  pass", "conditional"),
        ("try:\n  M = library.M\nexcept ImportError:\n  raise", "present"),
        ("if TYPE_CHECKING:\n  def M(self): ...", "missing"),
        ("if TYPE_CHECKING:\n  pass\nelse:\n  def M(self): return 1", "present"),
        ("with something:\n  def M(self): return 1", "present"),
        ("def __init__(self):\n  self.M = something", "present"),
        ("M: object", "missing"),
        ("M = None", "stub"),
        ("def M(self):\n  '''Text.'''\n  raise NotImplementedError", "stub"),
        ("def M(self): ...", "stub"),
        ("def __getattr__(self, name): return 1", "dynamic"),
    ],
)
def test_states(audited, body, state):
    lines = body.replace("M", GET).split("\n")
    source = "\n".join(["class TestedForCausalLM(nn.Module):", *(f"    {x}" for x in lines)])
    seen = audited(f"{source}\nEntryClass = TestedForCausalLM")
    assert seen.state("TestedForCausalLM", GET) == state
    kinds = {f.kind for f in seen.cls("TestedForCausalLM").findings if f.member == GET}
    assert kinds == ({state} if state in {"missing", "stub"} else set())


def test_a_class_defined_twice_is_conditional_where_one_definition_lacks_a_member(audited):
    seen = audited(f"""
        if is_npu():
            class TestedForCausalLM(LlamaForCausalLM):
                pass
        else:
            class TestedForCausalLM(nn.Module):
                def {SET}(self, layer_ids): self.layers = layer_ids
                def forward(self): return self.layers
        EntryClass = TestedForCausalLM
    """)
    (state,) = [m for m in seen.cls("TestedForCausalLM").members if m.name == GET]
    assert state.state == "conditional"
    assert "missing from sglang/srt/models/tested.py:10" in state.detail
    assert seen.state("TestedForCausalLM", SET) == "present"
    assert seen.cls("TestedForCausalLM").verdict == "undecided"
    assert seen.ids == set()


def test_a_base_with_alternatives_gives_a_member_only_if_all_do(audited):
    seen = audited(
        """
        if is_npu():
            Base = LlamaForCausalLM
        else:
            from sglang.srt.models.plain import Base
        class TestedForCausalLM(Base):
            pass
        EntryClass = TestedForCausalLM
    """,
        plain=f"class Base(nn.Module):\n    def {GET}(self): return self.pair",
    )
    assert seen.state("TestedForCausalLM", GET) == "present"
    assert seen.state("TestedForCausalLM", SET) == "conditional"


@pytest.mark.parametrize(
    ("base", "state"),
    [
        ("sglang.srt.models.lost.Base", "unknown"),
        ("vendor.models.Base", "unknown"),
        ("torch.nn.Module", "missing"),
        ("transformers.PreTrainedModel", "missing"),
    ],
)
def test_bases_outside_the_tree(audited, base, state):
    module, name = base.rsplit(".", 1)
    seen = audited(f"""
        from {module} import {name} as Outside
        class TestedForCausalLM(Outside): pass
        EntryClass = TestedForCausalLM
    """)
    assert seen.state("TestedForCausalLM", GET) == state
    supplied = seen.state("TestedForCausalLM", "get_input_embeddings")
    assert supplied == ("present" if module == "transformers" else state)


def test_dynamic_tells_where_getattr_looks(audited):
    seen = audited("""
        class TestedForCausalLM:
            def __init__(self, config):
                self.inner = LlamaForCausalLM(config)
            def __getattr__(self, name):
                return getattr(self.inner, name)
        EntryClass = TestedForCausalLM
    """)
    details = {m.name: m.detail for m in seen.cls("TestedForCausalLM").states("dynamic")}
    assert details[GET] == "left to __getattr__, which asks self.inner: in LlamaForCausalLM"
    assert details["start_layer"].endswith("asks self.inner: in none of its classes")
    assert seen.ids == set()
    assert seen.cls("TestedForCausalLM").verdict == "undecided"
