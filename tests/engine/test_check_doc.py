"""docs/contract.md against the code: every code of a finding is explained, every test exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "src/eyas/models").glob("*.py"), *(ROOT / "src/eyas/engine").glob("*.py")]
TEXT = (ROOT / "docs/contract.md").read_text()


def section(title: str) -> str:
    """The text under a heading of the second level."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def documented() -> set[str]:
    rows = [
        row.split("|")[1]
        for row in section("What the check reports").splitlines()
        if row[:1] == "|"
    ]
    return {code for row in rows for code in re.findall(r"`([a-z0-9-]+)`", row)}


def codes_in_source() -> set[str]:
    """The second argument of every .error, .warn and .skip, and the kinds of drafts."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\Adraft-kind[a-z0-9-]*\Z", node.value))
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("error", "warn", "skip") and len(node.args) >= 3:
                code = node.args[1]
                if isinstance(code, ast.Constant):
                    found.add(str(code.value))
    kinds = ("missing", "left-over", "twice", "wrong-shape", "wrong-dtype")
    return found | {f"tensors-{kind}" for kind in kinds}


def test_every_code_is_explained_and_none_is_invented() -> None:
    assert len(codes_in_source()) > 50
    assert documented() == codes_in_source()


def test_every_test_that_is_named_exists() -> None:
    defined = {
        (path.name, test)
        for path in (ROOT / "tests").rglob("test_*.py")
        for test in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.M)
    }
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 100
    assert set(named) <= defined
