"""The audit on SGLang's own wheels, against what is known of those releases.

The wheels come from PyPI once (56 MB together) and stay in Eyas' cache folder. Each case was found
by hand in the source, or by serving the model.
"""

import functools
import subprocess
import sys

import pytest

from eyas.audit import AuditReport, ClassReport, audit
from eyas.models.embedded import cache_folder

GET = "get_embed_and_head"
PUT = "set_embed_and_head"
SET = "set_eagle3_layers_to_capture"
OLDEST, MIDDLE, LATER, NEWEST = "0.5.5.post2", "0.5.9", "0.5.11", "0.5.23"
MAX_SECONDS = 20


@functools.cache
def release(version: str) -> AuditReport:
    """The audit of a release, its wheel fetched if it is not in the cache."""
    folder = cache_folder() / "wheels"
    name = f"sglang-{version}-*.whl"
    if not list(folder.glob(name)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        platform = ["--only-binary=:all:", "--python-version=3.11", "--platform=any"]
        platform += [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (34, 28, 17)]
        subprocess.run([*pip, *platform, "-d", folder, f"sglang=={version}"], check=True)
    (wheel,) = folder.glob(name)
    return audit(wheel, "sglang")


def cls(version: str, name: str) -> ClassReport:
    (found,) = [c for c in release(version).classes if c.name == name]
    return found


@pytest.mark.parametrize("version", [OLDEST, MIDDLE, LATER, NEWEST])
def test_all_of_a_release_is_read_in_seconds(version):
    report = release(version)
    assert report.version == version
    assert report.problems == ()
    assert report.seconds < MAX_SECONDS
    assert len(report.targets) > 100


@pytest.mark.parametrize("version", [OLDEST, MIDDLE, NEWEST])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_complete_models_have_no_findings(version, name):
    assert cls(version, name).verdict == "complete"
    assert "captures" in {e.verdict for e in cls(version, name).effects}


@pytest.mark.parametrize(
    ("version", "name", "missing", "in_inner"),
    [
        (MIDDLE, "KimiK25ForConditionalGeneration", {GET, SET, PUT}, {GET, SET}),
        (MIDDLE, "Qwen3VLMoeForConditionalGeneration", {GET, SET}, {SET}),
        (OLDEST, "MiniMaxM2ForCausalLM", {GET}, set()),
        (NEWEST, "DeepseekOCRForCausalLM", {GET, SET}, {GET, SET}),
        (NEWEST, "KimiVLForConditionalGeneration", {GET, SET}, {GET, SET}),
        (NEWEST, "InternVLChatModel", {GET, SET}, {GET, SET}),
    ],
)
def test_known_gaps(version, name, missing, in_inner):
    found = cls(version, name)
    required = {GET, SET} & missing
    assert missing <= {m.name for m in found.states("missing")}
    assert set(found.missing("required")) == required
    assert {f.member for f in found.findings} == required
    assert {f.member for f in found.findings if f.in_inner} == in_inner


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (NEWEST, "KimiK25ForConditionalGeneration"),
        (LATER, "Qwen3VLMoeForConditionalGeneration"),
        (NEWEST, "MiniMaxM2ForCausalLM"),
    ],
)
def test_gaps_that_a_later_release_closed(version, name):
    assert cls(version, name).verdict == "complete"


def test_a_dynamic_class_is_neither_complete_nor_a_finding():
    found = cls(NEWEST, "MiniCPMV")
    assert {m.name for m in found.states("dynamic")} >= {GET, SET}
    assert (found.findings, found.verdict) == ((), "undecided")


@pytest.mark.parametrize("kind", ["", "Moe"])
def test_a_method_that_captured_nothing(kind):
    """Qwen3.5 inherited a setter whose list its own decoder did not read; later it had its own."""
    name = f"Qwen3_5{kind}ForConditionalGeneration"
    assert [f.kind for f in cls(LATER, name).findings] == ["dead-setter"]
    assert cls(NEWEST, name).verdict == "complete"
