"""Known findings, accepted from an earlier report or a list of ids."""

import json

import pytest

from eyas.audit import AuditError, apply_baseline

LACKING = "class TestedForCausalLM(nn.Module): pass\nEntryClass = TestedForCausalLM"
GET = "TestedForCausalLM:get_embed_and_head:missing"
SET = "TestedForCausalLM:set_eagle3_layers_to_capture:missing"


def test_an_earlier_report_accepts_all_of_its_findings(audited, tmp_path):
    report = audited(LACKING).report
    file = tmp_path / "known.json"
    file.write_text(report.to_json())
    accepted = apply_baseline(report, file)
    assert len(report.open_findings) == 2
    assert accepted.open_findings == []
    assert len(accepted.findings) == 2
    assert accepted.resolved == ()


def test_only_new_findings_stay_open(audited, tmp_path):
    file = tmp_path / "known.json"
    file.write_text(json.dumps([GET, "GoneForCausalLM:get_embed_and_head:missing"]))
    report = apply_baseline(audited(LACKING).report, file)
    assert [f.id for f in report.open_findings] == [SET]
    assert report.resolved == ("GoneForCausalLM:get_embed_and_head:missing",)
    assert report.to_dict()["summary"]["accepted"] == 1


def test_a_file_that_cannot_be_read_can_be_accepted(audited, tmp_path):
    report = audited("", broken="def").report
    file = tmp_path / "known.json"
    file.write_text(report.to_json())
    assert report.open_findings
    assert apply_baseline(report, file).open_findings == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"3", "neither an audit's --json report nor a list"),
        (b"[1, 2]", "neither an audit's --json report nor a list"),
        (b'{"findings": [{"name": "x"}]}', "neither an audit's --json report nor a list"),
        (b'{"engine": "vllm", "findings": []}', "made for vllm, not for sglang"),
    ],
)
def test_what_is_no_baseline(audited, tmp_path, content, message):
    file = tmp_path / "known.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(AuditError, match=message):
        apply_baseline(audited("").report, file)
