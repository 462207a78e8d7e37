"""Names followed across modules: cycles, stars, re-exports; files that cannot be parsed."""

import pytest

SET = "set_eagle3_layers_to_capture"


def test_an_import_cycle_ends(audited):
    seen = audited(
        """
        from sglang.srt.models.partner import Partner
        class TestedForCausalLM(Partner): pass
        EntryClass = [TestedForCausalLM, Partner]
        """,
        partner="""
        from sglang.srt.models.tested import TestedForCausalLM
        from sglang.srt.models.tested import Loop as Loop
        class Partner(LlamaForCausalLM): pass
        class LostForCausalLM(Loop): pass
        EntryClass = [LostForCausalLM]
        """,
    )
    assert seen.cls("TestedForCausalLM").verdict == "complete"
    assert seen.state("LostForCausalLM", SET) == "unknown"


def test_a_class_that_inherits_from_itself_through_a_cycle_ends(audited):
    seen = audited(
        """
        from sglang.srt.models.partner import PartnerForCausalLM
        class TestedForCausalLM(PartnerForCausalLM): pass
        """,
        partner="""
        from sglang.srt.models.tested import TestedForCausalLM
        class PartnerForCausalLM(TestedForCausalLM): pass
        EntryClass = PartnerForCausalLM
        """,
    )
    assert seen.state("PartnerForCausalLM", SET) == "missing"


def test_a_syntax_error_is_reported_and_the_rest_goes_on(audited):
    seen = audited(
        "from sglang.srt.models.broken import Base\n"
        "class TestedForCausalLM(Base): pass\n"
        "EntryClass = TestedForCausalLM",
        broken="class Base(nn.Module):\n    def broken(:\n        pass",
    )
    (problem,) = seen.report.problems
    assert (problem.file, problem.line) == ("sglang/srt/models/broken.py", 6)
    assert problem.message.startswith("not Python 3.")
    assert seen.ids == {"sglang/srt/models/broken.py:unreadable"}
    assert seen.state("TestedForCausalLM", SET) == "unknown"
    assert "broken.py cannot be read" in seen.cls("TestedForCausalLM").members[0].detail
    assert seen.cls("LlamaForCausalLM").verdict == "complete"


def test_null_bytes_are_a_problem_of_their_file_only(sglang_tree, audited):
    seen = audited("", damaged="x = '\0'")
    assert [p.file for p in seen.report.problems] == ["sglang/srt/models/damaged.py"]


@pytest.mark.parametrize(
    "source",
    [
        "from sglang.srt.models.exports import *\nclass Tested(Exported): pass",
        "from .exports import Exported\nclass Tested(Exported): pass",
        "from . import exports\nclass Tested(exports.Exported): pass",
        "from ..models.exports import Exported as E\nclass Tested(E): pass",
        "try:\n    from nowhere import Exported\nexcept ImportError:\n"
        "    from .exports import Exported\nclass Tested(Exported): pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .exports import Exported\n"
        "class Tested(Exported): pass",
        "Base, other = LlamaForCausalLM, 1\nclass Tested(Base): pass",
        "class Outer:\n    class Inner(LlamaForCausalLM): pass\nclass Tested(Outer.Inner): pass",
    ],
)
def test_ways_to_name_a_base(audited, source):
    exports = "from sglang.srt.models.llama import LlamaForCausalLM as Exported"
    seen = audited(f"{source}\nEntryClass = Tested", exports=exports)
    state = seen.state("Tested", SET)
    assert state == ("conditional" if "nowhere" in source else "present")
