"""Folders, wheels and sdists in, and what is wrong with them out."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from eyas.audit import AuditError, audit
from eyas.audit import source as source_module


def write_zip(path: Path, tree: Path, *, prefix: str = "", **extra: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(tree.rglob("*.py")):
            archive.write(file, f"{prefix}{file.relative_to(tree)}")
        for name, text in extra.items():
            archive.writestr(name, text)
    return path


def write_tar(path: Path, tree: Path, *, prefix: str, metadata: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree / "sglang", f"{prefix}python/sglang")
        info = tarfile.TarInfo(f"{prefix}PKG-INFO")
        info.size = len(metadata)
        archive.addfile(info, io.BytesIO(metadata.encode()))
    return path


def names(path: Path) -> list[str]:
    return [c.name for c in audit(path, "sglang").classes]


@pytest.mark.parametrize("part", ["", "sglang", "sglang/srt", "sglang/srt/models"])
def test_a_folder_above_at_or_inside_the_package(sglang_tree, part):
    assert names(sglang_tree() / part) == ["LlamaForCausalLM"]


def test_a_repository_with_the_package_further_down(sglang_tree, tmp_path):
    tree = sglang_tree()
    repository = tmp_path / "checkout"
    (repository / "some/place").mkdir(parents=True)
    (tree / "sglang").rename(repository / "some/place/sglang")
    assert names(repository) == ["LlamaForCausalLM"]


def test_build_copies_are_not_taken_for_the_package(sglang_tree, tmp_path):
    copy = tmp_path / "build/lib/sglang/srt/models"
    copy.mkdir(parents=True)
    (copy / "old.py").write_text("class Old: pass\nEntryClass = Old")
    assert names(sglang_tree()) == ["LlamaForCausalLM"]


def test_a_wheel(sglang_tree, tmp_path):
    wheel = write_zip(
        tmp_path / "sglang-1.2-py3-none-any.whl",
        sglang_tree(),
        **{"sglang-1.2.dist-info/METADATA": "Name: sglang\nVersion: 1.2\n"},
    )
    report = audit(wheel, "sglang")
    assert (report.version, [c.name for c in report.classes]) == ("1.2", ["LlamaForCausalLM"])
    assert report.classes[0].location == "sglang/srt/models/llama.py:18"


def test_sdists(sglang_tree, tmp_path):
    tree = sglang_tree()
    tar = write_tar(
        tmp_path / "sglang-1.3.tar.gz", tree, prefix="sglang-1.3/", metadata="Version: 1.3\n"
    )
    zipped = write_zip(tmp_path / "main.zip", tree, prefix="sglang-main/python/")
    assert audit(tar, "sglang").version == "1.3"
    assert audit(zipped, "sglang").version is None
    assert audit(tar, "sglang").classes == audit(zipped, "sglang").classes
    assert audit(tar, "sglang").classes == audit(tree, "sglang").classes


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("sglang/version.py", "__version__ = '1.4'", "1.4"),
        ("sglang/_version.py", "version: str = '1.5.dev1'", "1.5.dev1"),
        ("sglang-1.6.dist-info/METADATA", "Name: sglang\nVersion: 1.6\n", "1.6"),
        ("sglang/version.py", "__version__ = read()", None),
    ],
)
def test_the_version_of_a_folder(sglang_tree, file, text, version):
    tree = sglang_tree()
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(text)
    assert audit(tree, "sglang").version == version


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(AuditError, match="no such file or folder"):
        audit(tmp_path / "lost.whl", "sglang")


def test_a_file_that_is_no_archive(tmp_path):
    (tmp_path / "page.whl").write_text("<html>not found</html>")
    with pytest.raises(AuditError, match="neither a folder nor a wheel or sdist"):
        audit(tmp_path / "page.whl", "sglang")


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_an_archive_cut_short(sglang_tree, tmp_path, share):
    tree = sglang_tree(big="x = '" + "".join(map(str, range(20000))) + "'")
    wheel = write_zip(tmp_path / "a.whl", tree)
    tar = write_tar(tmp_path / "a.tar.gz", tree, prefix="", metadata="")
    for archive in (wheel, tar):
        data = archive.read_bytes()
        archive.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(AuditError, match=r"cannot be read|cut short"):
            audit(archive, "sglang")


def test_a_damaged_member_is_reported_and_the_rest_goes_on(sglang_tree, tmp_path):
    text = f"x = '{'abcdefgh' * 99}'"
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("sglang/srt/models/damaged.py", text)
        llama = sglang_tree() / "sglang/srt/models/llama.py"
        archive.write(llama, "sglang/srt/models/llama.py")
    wheel.write_bytes(wheel.read_bytes().replace(b"abcdefgh", b"abcdefgx", 1))
    report = audit(wheel, "sglang")
    assert [c.name for c in report.classes] == ["LlamaForCausalLM"]
    (problem,) = report.problems
    assert problem.file == "sglang/srt/models/damaged.py"
    assert problem.message.startswith("damaged in the archive")


def test_a_file_too_large_for_source_is_reported(sglang_tree, tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "MAX_FILE_BYTES", 5000)
    tree = sglang_tree(big="#" * 6000)
    archives = [
        tree,
        write_zip(tmp_path / "a.whl", tree),
        write_tar(tmp_path / "a.tar.gz", tree, prefix="", metadata=""),
    ]
    for archive in archives:
        (problem,) = audit(archive, "sglang").problems
        assert problem.file == "sglang/srt/models/big.py"
        assert "too large" in problem.message


def test_no_models_folder(tmp_path):
    (tmp_path / "setup.py").write_text("")
    wheel = write_zip(tmp_path / "a.whl", tmp_path)
    tmp_path.joinpath("empty").mkdir()
    for path in (tmp_path / "empty", wheel):
        with pytest.raises(AuditError, match="holds no sglang/srt/models folder; is it sglang"):
            audit(path, "sglang")


def test_another_engine_than_asked_for(sglang_tree):
    with pytest.raises(AuditError, match="holds no vllm/model_executor/models folder"):
        audit(sglang_tree(), "vllm")


def test_an_unknown_engine(sglang_tree):
    with pytest.raises(AuditError, match="unknown engine 'sglan'.*sglang, vllm"):
        audit(sglang_tree(), "sglan")


def test_nothing_is_imported_or_run(sglang_tree, tmp_path):
    mark = tmp_path / "ran"
    sglang_tree(evil=f"open({str(mark)!r}, 'w').write('x')\nclass A: pass\nEntryClass = A")
    assert "A" in names(tmp_path)
    assert not mark.exists()
