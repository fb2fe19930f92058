"""The inputs of a shard: what its tests import, and the data in those folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.shards.catalogue import Shard, Word, read_catalogue
from tools.shards.inputs import InputFinder

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "constraints.txt": "numpy==2\n",
    "pyproject.toml": 'Model = "dbo_models.dense:Adapter"\n',
    "dbo_runtime/__init__.py": "",
    "dbo_runtime/batch.py": "from . import errors\n",
    "dbo_runtime/errors.py": "",
    "dbo_runtime/unused.py": "",
    "dbo_runtime/lab/__init__.py": "",
    "dbo_runtime/lab/cases.py": "from ..errors import Error\n",
    "dbo_runtime/lab/published/case.json": "{}\n",
    "models/__init__.py": "",
    "models/dense.py": "import dbo_runtime.batch\n",
    "tests/conftest.py": "from tests import profiles\n",
    "tests/profiles.py": "",
    "tests/shards.json": "{}\n",
    "tests/ledger.json": "{}\n",
    "tests/ir/test_batch.py": "def test_it():\n    from dbo_runtime.batch import Batch\n",
    "tests/ir/golden/batch.txt": "",
    "tests/ir/__pycache__/test_batch.pyc": "",
    "tests/ir/things.egg-info/PKG-INFO": "",
    "tests/lab/test_cases.py": 'COMMAND = ["-m", "dbo_runtime.lab.cases"]\n',
    "tests/vllm_plugin/conftest.py": "",
    "tests/vllm_plugin/test_engine.py": "from vllm import LLM\n",
    "examples/demo.py": "from dbo_runtime import errors\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a small tree with packages, tests and data."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def make_shard(*tests: str, inputs: tuple[str, ...] = (), word: str = "test-slow") -> Shard:
    return Shard("shard", Word(word, "SLOW_TESTS"), tests, 1, inputs=inputs)


COMMON = {"constraints.txt", "tests/conftest.py", "tests/profiles.py"}


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        (
            make_shard("tests/ir/test_batch.py::test_it"),
            {
                "dbo_runtime/__init__.py",
                "dbo_runtime/batch.py",
                "dbo_runtime/errors.py",
                "tests/ir/golden/batch.txt",
                "tests/ir/test_batch.py",
            },
        ),
        (
            make_shard("tests/lab"),
            {
                "dbo_runtime/__init__.py",
                "dbo_runtime/errors.py",
                "dbo_runtime/lab/__init__.py",
                "dbo_runtime/lab/cases.py",
                "dbo_runtime/lab/published/case.json",
                "tests/lab/test_cases.py",
            },
        ),
        (
            make_shard("tests/vllm_plugin/test_engine.py"),
            {
                "dbo_runtime/__init__.py",
                "dbo_runtime/batch.py",
                "dbo_runtime/errors.py",
                "models/__init__.py",
                "models/dense.py",
                "tests/vllm_plugin/conftest.py",
                "tests/vllm_plugin/test_engine.py",
            },
        ),
        (
            make_shard("tests/profiles.py", inputs=("examples",)),
            {"dbo_runtime/__init__.py", "dbo_runtime/errors.py", "examples/demo.py"},
        ),
    ],
    ids=["imports", "a module that is named, and its data", "what vLLM loads", "what is named"],
)
def test_inputs_are_what_tests_import_and_what_lies_beside(tree: Path, shard: Shard, expected: set[str]) -> None:
    assert {*InputFinder(tree, ("constraints.txt",)).find_inputs(shard)} == COMMON | expected


@pytest.mark.parametrize(
    ("file", "touched"),
    [
        ("dbo_runtime/errors.py", True),
        ("tests/profiles.py", True),
        ("constraints.txt", True),
        ("tests/ir/golden/batch.txt", True),
        ("dbo_runtime/unused.py", False),
        ("tests/ledger.json", False),
        ("tests/shards.json", False),
        ("tests/ir/__pycache__/test_batch.pyc", False),
    ],
)
def test_a_change_touches_a_shard_if_it_is_among_the_inputs(tree: Path, file: str, touched: bool) -> None:
    shard = make_shard("tests/ir/test_batch.py")
    before = InputFinder(tree, ("constraints.txt",)).digest(shard)
    with (tree / file).open("a") as changed:
        changed.write("\n# changed\n")
    assert (InputFinder(tree, ("constraints.txt",)).digest(shard) != before) == touched


def test_a_shard_that_runs_other_tests_or_by_another_word_is_touched(tree: Path) -> None:
    finder = InputFinder(tree)
    shards = [
        make_shard("tests/ir/test_batch.py"),
        make_shard("tests/ir/test_batch.py::test_it"),
        make_shard("tests/ir/test_batch.py", word="test-ascend"),
    ]
    assert len({finder.digest(shard) for shard in shards}) == len(shards)


@pytest.mark.slow
def test_every_shard_here_depends_on_the_runtime_and_names_what_is_there() -> None:
    catalogue = read_catalogue(ROOT)
    finder = InputFinder(ROOT, catalogue.inputs)
    for shard in catalogue.shards:
        inputs = finder.find_inputs(shard)
        assert "tests/conftest.py" in inputs
        assert "constraints.txt" in inputs
        assert [path for path in inputs if path.startswith("dbo_runtime/")], shard.name
        named = (*shard.tests, *shard.inputs, *shard.word.inputs)
        assert not [path for path in named if not (ROOT / path.partition("::")[0]).exists()], shard.name
