"""Gates on the size and the documentation of the source, read from the syntax tree.

Small functions and files are what keeps the engine readable. A limit that is in the way means that
something wants splitting; it is not raised.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400

Function = ast.FunctionDef | ast.AsyncFunctionDef


def decorators(node: Function) -> set[str]:
    """Last names of a function's decorators: ``@triton.jit(debug=True)`` gives "jit"."""
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {ast.unparse(call).rsplit(".", 1)[-1] for call in calls}


def size_problems(path: Path, text: str) -> Iterator[str]:
    """Files and functions over their limits, and modules named for nothing in particular."""
    if path.name == "utils.py":
        yield f"{path}: name the module after what it holds"
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, Function) or "jit" in decorators(node):
            continue
        assert node.end_lineno is not None
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield (
                f"{path}:{node.lineno}: {node.name} has {num_lines} lines, "
                f"at most {MAX_FUNCTION_LINES}"
            )


def public_definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Public functions and classes of a module, with the public methods of those classes.

    An overload, a property's setter and an explicit override are described elsewhere.
    """
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from public_definitions(node.body + node.orelse)
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if isinstance(node, Function):
            if decorators(node).isdisjoint({"overload", "override", "setter", "deleter"}):
                yield node
            continue
        yield node
        yield from public_definitions(node.body)


def docstring_problems(path: Path, text: str) -> Iterator[str]:
    """Modules and public names without a docstring."""
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield f"{path}: no module docstring"
    for node in public_definitions(tree.body):
        if not ast.get_docstring(node):
            yield f"{path}:{node.lineno}: {node.name} has no docstring"


def python_files(folder: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text()


def test_sizes() -> None:
    files = [*python_files("src"), *python_files("tests")]
    found = [problem for path, text in files for problem in size_problems(path, text)]
    assert files
    assert not found, "\n" + "\n".join(found)


def test_docstrings() -> None:
    found = [p for path, text in python_files("src") for p in docstring_problems(path, text)]
    assert not found, "\n" + "\n".join(found)


LONG = "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("name", "source", "num_problems"),
    [
        ("a.py", f"def f():\n{LONG}", 1),
        ("a.py", f"class A:\n  async def f():\n{LONG}", 1),
        ("a.py", f"@triton.jit\ndef f():\n{LONG}", 0),
        ("a.py", f"@triton.autotune(key=[])\n@triton.jit(debug=True)\ndef f():\n{LONG}", 0),
        ("a.py", f"def f():\n{LONG[: -len('    x = 1' + chr(10))]}", 0),
        ("a.py", "x = 1\n" * MAX_FILE_LINES, 0),
        ("a.py", "x = 1\n" * (MAX_FILE_LINES + 1), 1),
        ("utils.py", "x = 1\n", 1),
    ],
)
def test_sizes_are_measured(name: str, source: str, num_problems: int) -> None:
    assert len(list(size_problems(Path(name), source))) == num_problems


@pytest.mark.parametrize(
    ("source", "num_problems"),
    [
        ("x = 1", 1),
        ('"""Doc."""\ndef f(): ...', 1),
        ('"""Doc."""\nif True:\n  def f(): ...', 1),
        ('"""Doc."""\ndef f():\n  """Doc."""\n  def g(): ...', 0),
        ('"""Doc."""\nclass A:\n  def f(self): ...', 2),
        ('"""Doc."""\nclass A:\n  """Doc."""\n  def __len__(self): ...\n  def _f(self): ...', 0),
        ('"""Doc."""\nclass _A:\n  def f(self): ...', 0),
        ('"""Doc."""\n@typing.overload\ndef f(): ...', 0),
    ],
)
def test_missing_docstrings_are_found(source: str, num_problems: int) -> None:
    assert len(list(docstring_problems(Path("a.py"), source))) == num_problems
