"""Who may import whom among tests; CONTRIBUTING.md says where their helpers belong."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SUPPORT, BENCHMARKS = "tests.support.", "tests.benchmarks."


class Module(NamedTuple):
    """A module, what it imports anywhere, and its strings: other processes are told there what to import or to run."""

    file: str
    imported: set[str]
    strings: str


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): read_module(path)
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }


def read_module(path: Path) -> Module:
    imported: set[str] = set()
    strings = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    return Module(path.name, imported, "\n".join(strings))


def test_nothing_imports_a_test(modules: dict[str, Module]) -> None:
    tests = {name for name, module in modules.items() if module.file.startswith("test_")}
    assert {name: module.imported & tests for name, module in modules.items() if module.imported & tests} == {}


def test_only_their_own_tests_import_benchmarks(modules: dict[str, Module]) -> None:
    importers = {name for name, module in modules.items() if BENCHMARKS in "\n".join(module.imported)}
    assert {name for name in importers if not name.startswith((BENCHMARKS, "tests.test_benchmarks_"))} == set()


def test_all_that_is_shared_is_used(modules: dict[str, Module]) -> None:
    unused = {
        name
        for name, module in modules.items()
        if name.startswith(SUPPORT)
        and not any(
            name in other.imported or name in other.strings or module.file in other.strings
            for other in modules.values()
            if other is not module
        )
    }
    assert unused == set()
