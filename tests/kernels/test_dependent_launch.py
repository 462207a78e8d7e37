"""The rules of dependent launch, read from the kernels' source: no GPU shows their breach reliably.

A kernel that lets the next one start early must itself wait for the ones before it, and must do so
before it writes anything; the same holds for what it calls.
"""

import ast
from pathlib import Path

import pytest

import eyas.kernels

WRITES = {"store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg"}
FILES = sorted(Path(eyas.kernels.__file__).parent.glob("triton_*.py"))


def functions() -> dict[str, ast.FunctionDef]:
    """Triton's functions by name."""
    return {
        node.name: node
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def calls(function: ast.FunctionDef) -> list[tuple[int, str]]:
    """(line, name) of all calls; the last part of a dotted name."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            found.append((node.lineno, ast.unparse(node.func).rpartition(".")[2]))
    return sorted(found)


def writers(known: dict[str, ast.FunctionDef]) -> set[str]:
    """Names of calls that write to memory, at any depth."""
    names = set(WRITES)
    while True:
        more = {n for n, f in known.items() if names & {call for _, call in calls(f)}} - names
        if not more:
            return names
        names |= more


FUNCTIONS = functions()
DEPENDENT = [
    name
    for name, function in FUNCTIONS.items()
    if name.endswith("_kernel") and "PDL" in {argument.arg for argument in function.args.args}
]


def test_the_kernels_were_found() -> None:
    assert {"_tree_kernel", "_vector_kernel", "_settle_kernel"} < set(DEPENDENT)


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_kernel_waits_before_it_writes(name: str) -> None:
    made = calls(FUNCTIONS[name])
    waits = [line for line, call in made if call == "wait_for_inputs"]
    assert waits and any(call == "let_next_start" for _, call in made)
    writes = [line for line, call in made if call in writers(FUNCTIONS)]
    assert writes and max(waits) < min(writes)


def launches() -> list[tuple[str, bool]]:
    """(kernel, whether its launch takes the options) of all `kernel[grid](...)`."""
    found = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
                continue
            name = ast.unparse(node.func.value)
            unpacked = [ast.unparse(k.value) for k in node.keywords if k.arg is None]
            if name in FUNCTIONS and name != "_probe_kernel":
                found.append((name, "launch_options()" in unpacked))
    return found


def test_launches_have_the_option_and_the_argument_or_neither() -> None:
    """The linears' launches, which choose their kernel, are told apart by the compile tests."""
    made = launches()
    assert len(made) > 15
    for name, dependent in made:
        assert dependent == (name in DEPENDENT), name
