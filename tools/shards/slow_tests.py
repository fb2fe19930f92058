"""Find slow tests by reading them: which there are, and which no shard holds.

pytest itself needs half a minute, and finds tests inside vllm-ascend in another environment only. Here a test is slow
where its file is marked so, where one of its decorators is or names what is, or where one of its fixtures is: a
parameter with the mark is enough. `tests/shards/test_slow_tests.py` compares with what pytest finds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

from .catalogue import Shard, is_within

Function = ast.FunctionDef | ast.AsyncFunctionDef
ASCEND, NPU = "tests/ascend", "tests/standin/cann"  # each has an environment of its own
BENCHMARKS = "tests/benchmarks"  # run when named
# The word of `make` that runs tests in a folder, by whether they are slow. Others run with `make test`.
WORDS = MappingProxyType(
    {
        (ASCEND, True): "test-ascend-slow",
        (ASCEND, False): "test-ascend",
        (NPU, True): "test-npu-slow",
        ("tests", True): "test-slow",
    }
)


def check_shards(root: Path, shards: Sequence[Shard]) -> list[str]:
    """Say which tests no shard of their word holds, which are in two, and which shards name what holds no such test."""
    complaints: list[str] = []
    for (folder, slow), word in WORDS.items():
        files = [file for file in list_files(root) if find_folder(file) == folder]
        tests = [test for file in files for test in list_tests(root, file, slow)]
        own = [shard for shard in shards if shard.word.variable and shard.word.text.split()[0] == word]
        complaints += describe(word, tests, own)
    return complaints


def describe(word: str, tests: Sequence[str], shards: Sequence[Shard]) -> Iterator[str]:
    """Yield what is wrong with the shards of one word, which these tests belong to."""
    for test in tests:
        holders = [shard.name for shard in shards if shard.covers(test)]
        if len(holders) != 1:
            yield f"{test} is in {' and '.join(holders) or f'no shard of {word}'}: see tests/shards.json"
    for shard in shards:
        for entry in shard.tests:
            if not any(is_within(test, entry) for test in tests):
                yield f"{shard.name} names {entry}, which has no test for {word}"


def find_folder(file: str) -> str:
    """Return the folder whose tests a file is run with."""
    return next((folder for folder in (ASCEND, NPU) if is_within(file, folder)), "tests")


def list_files(root: Path) -> list[str]:
    """List the files of tests, relative to the root."""
    files = (path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py"))
    return sorted(file for file in files if not is_within(file, BENCHMARKS))


def list_tests(root: Path, file: str, slow: bool) -> list[str]:
    """List the tests of a file that have slow cases, or those that have others or might."""
    tree = ast.parse((root / file).read_text())
    marked = find_marked(find_shared(root, file), tree)
    tests = [node for node in tree.body if isinstance(node, Function) and node.name.startswith("test_")]
    if slow:
        return [f"{file}::{test.name}" for test in tests if "pytestmark" in marked or is_slow(test, marked)]
    return [f"{file}::{test.name}" for test in tests if "pytestmark" not in marked and not is_wholly_slow(test)]


def find_shared(root: Path, file: str) -> set[str]:
    """Return the fixtures with slow cases that the conftest.py files above a file have."""
    marked: set[str] = set()
    for folder in reversed(Path(file).parents):
        conftest = root / folder / "conftest.py"
        if conftest.is_file():
            tree = ast.parse(conftest.read_text())
            marked = find_marked(marked | find_imported(root, tree), tree)
    return marked


def find_imported(root: Path, tree: ast.Module) -> set[str]:
    """Return the fixtures with slow cases that a conftest.py imports from a helper of the tests."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            helper = root.joinpath(*str(node.module).split(".")).with_suffix(".py")
            marked = find_marked((), ast.parse(helper.read_text())) if helper.is_file() else set()
            found |= marked & {alias.name for alias in node.names}
    return found


def find_marked(shared: Iterable[str], tree: ast.Module) -> set[str]:
    """Return the names of a module that carry the mark, at once or through others; *shared* are those from above."""
    marked, nodes = {*shared}, list(name_nodes(tree))
    while True:
        found = {name for name, node in nodes if name not in marked and is_slow(node, marked)}
        if not found:
            return marked
        marked |= found


def name_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the assignments and functions of a module, each with its name; tests are no use to others."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("test_"):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def is_slow(node: ast.stmt, marked: set[str]) -> bool:
    """Return whether a statement has the mark, or names what has it. Of a test, its body does not count."""
    parts: list[ast.AST] = [node]
    if isinstance(node, Function):
        named = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        if marked & (named - list_parameters(node)):
            return True
        parts = [*node.decorator_list, *([] if node.name.startswith("test_") else node.body)]
    return any(has_mark(each, marked) for part in parts for each in ast.walk(part))


def list_parameters(test: Function) -> set[str]:
    """Return the arguments that decorators of a test give values to, which are no fixtures."""
    given = [each.args[0] for each in test.decorator_list if isinstance(each, ast.Call) and each.args]
    texts = [part.value for each in given for part in ast.walk(each) if isinstance(part, ast.Constant)]
    return {name.strip() for text in texts if isinstance(text, str) for name in text.split(",")}


def has_mark(node: ast.AST, marked: set[str]) -> bool:
    """Return whether a node of a statement is the mark, or a name that carries it."""
    if isinstance(node, ast.Attribute):
        return node.attr == "slow" and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    return isinstance(node, ast.Name) and node.id in marked


def is_wholly_slow(test: Function) -> bool:
    """Return whether a test has the mark itself, not only some of its cases."""
    return any(isinstance(each, ast.Attribute) and each.attr == "slow" for each in test.decorator_list)
