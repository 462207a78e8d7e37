"""The import directions between packages, read from the syntax tree.

A module may import from its own package and from rows below its own: never from another package of
its row, never from above. Imports inside functions and under ``TYPE_CHECKING`` count too, for they
tie the packages together just the same.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

ROWS = [
    {"types", "config", "contract"},
    {"kernels", "audit"},
    {"cache", "comm"},
    {"attention", "models"},
    {"scheduler", "speculative"},
    {"engine"},
    {"server", "train", "bench"},
    {"cli"},
    # The package itself (its lazy public names) and `python -m eyas`.
    {"", "__main__"},
]
ROW_OF = {package: row for row, packages in enumerate(ROWS) for package in packages}
# Stands alone, though its row would allow more.
ONLY = {"audit": {"types"}}


def module_package(parts: tuple[str, ...]) -> str:
    """The package of a dotted module name: ("eyas", "cache", "pool") is in "cache"."""
    return parts[1] if len(parts) > 1 else ""


def facade_homes(root: Path) -> dict[str, str]:
    """The lazy public names of ``eyas/__init__.py`` by the package that defines each."""
    path = root / "eyas/__init__.py"
    for node in ast.parse(path.read_text()).body if path.exists() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return {
                name: module_package(tuple(home.split(".")))
                for name, home in ast.literal_eval(node.value).items()
            }
    return {}


def imported_modules(
    tree: ast.Module, *, parts: tuple[str, ...], is_package: bool
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of everything that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base: tuple[str, ...] = ()
            if node.level:
                depth = len(parts) - node.level + is_package
                base = parts[:depth]
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((node.lineno, (*base, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            target = node.args[0] if node.args else None
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, tuple(target.value.split("."))


def violations(root: Path) -> list[str]:
    """Every import under ``root/eyas`` which goes up or sideways, or touches an unknown package."""
    homes = facade_homes(root)
    found = []
    for path in sorted((root / "eyas").rglob("*.py")):
        is_package = path.name == "__init__.py"
        relative = path.relative_to(root)
        parts = relative.parent.parts if is_package else relative.with_suffix("").parts
        package = module_package(parts)
        if package not in ROW_OF:
            found.append(f"{relative}: '{package}' has no row; give it one in tests/test_layers.py")
            continue
        tree = ast.parse(path.read_text(), filename=str(path))
        for line, target in imported_modules(tree, parts=parts, is_package=is_package):
            if target[0] != "eyas":
                continue
            imported = module_package(target)
            if len(target) == 2:
                imported = homes.get(imported, imported)
            if len(target) == 2 and imported.startswith("__version"):
                continue
            problem = direction_problem(package, imported)
            if problem:
                found.append(f"{relative}:{line}: {problem}")
    return found


def direction_problem(package: str, imported: str) -> str | None:
    """What is wrong with ``package`` importing ``imported``; None when nothing is."""
    if imported == package:
        return None
    if imported not in ROW_OF:
        return f"'{package}' imports '{imported}', which has no row"
    if ROW_OF[imported] >= ROW_OF[package]:
        return (
            f"'{package}' (row {ROW_OF[package]}) imports '{imported}' (row {ROW_OF[imported]}); "
            "only rows below its own are allowed"
        )
    if package in ONLY and imported not in ONLY[package]:
        return f"'{package}' imports '{imported}'; it may import {sorted(ONLY[package])} only"
    return None


def test_imports_point_down() -> None:
    found = violations(SOURCE)
    assert not found, "\n" + "\n".join(found)


def write_tree(root: Path, file: str, source: str) -> None:
    path = root / "eyas" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / "eyas/__init__.py").write_text('_HOMES = {"LLM": "eyas.engine.llm"}\n')
    path.write_text(source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cache/pool.py", "from eyas.engine.worker import Worker"),
        ("cache/pool.py", "import eyas.models.llama"),
        ("cache/pool.py", "from eyas import comm"),
        ("cache/pool.py", "from eyas import LLM"),
        ("cache/pool.py", "from ..engine import worker"),
        ("cache/pool.py", "from .. import engine"),
        ("cache/__init__.py", "from ..engine import worker"),
        ("cache/deep/pool.py", "from ...comm.group import Group"),
        ("cache/pool.py", "def load():\n    from eyas.engine import worker"),
        ("cache/pool.py", "import typing\nif typing.TYPE_CHECKING:\n    import eyas.cli"),
        ("cache/pool.py", "import importlib\nimportlib.import_module('eyas.cli')"),
        ("config.py", "from eyas.types import EyasError"),
        ("audit/scan.py", "from eyas.config import Config"),
        ("cache/pool.py", "import eyas"),
        ("cache/pool.py", "from eyas.newcomer import x"),
        ("newcomer/thing.py", "x = 1"),
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, file: str, source: str) -> None:
    write_tree(tmp_path, file, source)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cache/pool.py", "from eyas.types import EyasError\nfrom eyas.kernels import reference"),
        ("cache/pool.py", "from .pages import Pages\nfrom . import pages\nimport eyas.cache.pages"),
        ("cache/__init__.py", "from .pages import Pages"),
        ("cache/deep/pool.py", "from ..pages import Pages"),
        ("cache/pool.py", "import torch\nfrom transformers.models import llama"),
        ("cli.py", "from eyas import LLM, __version__, engine"),
        ("audit/scan.py", "from eyas.types import EyasError"),
    ],
)
def test_a_right_import_passes(tmp_path: Path, file: str, source: str) -> None:
    write_tree(tmp_path, file, source)
    assert violations(tmp_path) == []
