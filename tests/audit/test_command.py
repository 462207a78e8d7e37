"""Exit codes and output of the command, without its option parsing."""

import io
import json

import pytest
from rich.console import Console

from eyas.audit import run_audit

LACKING = "class TestedForCausalLM(nn.Module): pass\nEntryClass = TestedForCausalLM"


@pytest.fixture
def command():
    """Runs the command: the exit code, what it printed, and what it printed as an error."""

    def run(path, *, engine="sglang", **options):
        out, err = io.StringIO(), io.StringIO()
        code = run_audit(
            path,
            engine=engine,
            console=Console(file=out, width=100),
            error_console=Console(file=err, width=100),
            **options,
        )
        return code, out.getvalue(), err.getvalue()

    return run


def test_no_findings(command, sglang_tree):
    code, out, err = command(sglang_tree())
    assert (code, err) == (0, "")
    assert "1 complete, 0 undecided, 0 with findings" in out


def test_findings(command, sglang_tree):
    code, out, err = command(sglang_tree(tested=LACKING))
    assert (code, err) == (2, "")
    assert "TestedForCausalLM" in out


def test_an_unreadable_file_is_a_finding(command, sglang_tree):
    code, out, _ = command(sglang_tree(broken="def"))
    assert code == 2
    assert "broken.py" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tgi"}, "unknown engine 'tgi'"),
        ({"class_name": "TestedForCausal"}, "did you mean TestedForCausalLM?"),
        ({"baseline": "/nowhere/known.json"}, "baseline /nowhere/known.json"),
    ],
)
def test_usage_errors(command, sglang_tree, options, message):
    code, out, err = command(sglang_tree(tested=LACKING), **options)
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())


def test_json_is_whole_and_serves_as_a_baseline(command, sglang_tree, tmp_path):
    tree = sglang_tree(tested=LACKING)
    code, out, _ = command(tree, as_json=True)
    report = json.loads(out)
    assert code == 2
    assert report["engine"] == "sglang"
    assert report["summary"]["findings"] == 2
    assert report["findings"][0]["id"] == "TestedForCausalLM:get_embed_and_head:missing"
    (tested,) = [c for c in report["classes"] if c["name"] == "TestedForCausalLM"]
    assert tested["verdict"] == "findings"
    assert "set_embed_and_head" in tested["missing"]

    known = tmp_path / "known.json"
    known.write_text(out)
    assert command(tree, baseline=known)[0] == 0
    sglang_tree(tested=LACKING.replace("Tested", "Other"))
    code, out, _ = command(tree, baseline=known)
    assert code == 2
    assert "In the baseline, but findings no more:" in out
    assert command(tree, baseline=known, class_name="LlamaForCausalLM")[0] == 0


def test_equal_sources_give_equal_json(command, sglang_tree):
    tree = sglang_tree(tested=LACKING)
    assert command(tree, as_json=True) == command(tree, as_json=True)


@pytest.mark.parametrize(("name", "expected"), [("TestedForCausalLM", 2), ("LlamaForCausalLM", 0)])
def test_one_class_decides_the_exit_code_alone(command, sglang_tree, name, expected):
    tree = sglang_tree(tested=LACKING, broken="def")
    code, out, _ = command(tree, class_name=name)
    assert code == expected
    assert out.startswith(f"{name} (sglang), ")
    code, out, _ = command(tree, class_name=name, as_json=True)
    assert code == expected
    assert [c["name"] for c in json.loads(out)["classes"]] == [name]
