"""What comes from outside is read, or refused with a DboError.

Of each kind, 50 inputs each time, 500 in a slow test, and 20,000 by `make fuzz`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from random import Random

import pytest

import dbo_runtime
from dbo_runtime.errors import DboError
from tests.reliability.bad_input import fuzz, read_odd_places
from tests.support.profiles import scale
from tests.support.reliability.odd_inputs import ODD_VALUES, change, list_large
from tests.support.reliability.outcomes import MAX_BYTES, Outcomes
from tests.support.reliability.readers import Reader, list_plugin_readers, list_readers, open_folder

READERS = {reader.name: reader for reader in list_readers()}
FILES = {name: reader for name, reader in READERS.items() if reader.file}
SLOW_TO_READ = ("30 MiB of text", "1 million objects", "2 million names", "2 million names after wide text")
INPUTS = 50
SLOWLY_READ = ("config.json of a model",)  # a tenth of a second each

PACKAGES = [Path(dbo_runtime.__file__).parent, Path(__file__).parents[2] / "models"]
RUNS_WHAT_IT_READS = {"eval", "exec", "compile", "all_gather_object", "broadcast_object_list", "broadcast_object"}
ALLOWED = {
    # The function that issues a schedule: its source is made of numbers and of names that are plain words.
    "engine/generated_executor.py": {"exec", "compile"},
    # The two halves of a forward that Python itself has imported, if its file still says what was imported.
    "api/attention.py": {"exec", "compile"},
}


@pytest.mark.parametrize("inputs", [INPUTS, pytest.param(10 * INPUTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_what_comes_from_outside_is_read_or_refused(name: str, inputs: int) -> None:
    is_quick = READERS[name].share == 1.0 and name not in SLOWLY_READ
    outcomes = fuzz(READERS[name], scale(50 * INPUTS) if is_quick else inputs)
    assert outcomes.others == []
    if outcomes.inputs >= 2 * INPUTS:  # fewer may have no valid one among them
        assert outcomes.accepted > 0, "none of them was valid"
        assert outcomes.refused > 0
    assert outcomes.memory < MAX_BYTES


@pytest.mark.vllm
@pytest.mark.parametrize("reader", list_plugin_readers(), ids=lambda reader: reader.name)
def test_what_ranks_and_vllm_say_is_read_or_refused(reader: Reader) -> None:
    assert fuzz(reader, 10 * INPUTS).others == []


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_at_once(name: str) -> None:
    outcomes = Outcomes()
    read_odd_places(FILES[name], outcomes)
    assert outcomes.others == []
    assert outcomes.refused == outcomes.inputs if name != "metrics folder" else outcomes.inputs > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cost file", "trace"])
@pytest.mark.parametrize(
    ("what", "make"), [pytest.param(*each, id=each[0]) for each in list_large({}) if each[0] not in SLOW_TO_READ]
)
def test_large_files_are_refused_before_they_fill_the_memory(
    name: str, what: str, make: object, tmp_path: Path
) -> None:
    outcomes = Outcomes()
    with open_folder(tmp_path) as prepare:
        outcomes.observe(prepare(FILES[name], make()), what)  # type: ignore[operator]
    assert (outcomes.refused, outcomes.others) == (1, [])
    assert outcomes.memory < MAX_BYTES / 4


def test_nothing_runs_what_a_file_or_another_rank_sends() -> None:
    """No pickle in any form, and nothing that runs a text."""
    found: dict[str, set[str]] = {}
    for file in (file for package in PACKAGES for file in sorted(package.rglob("*.py"))):
        names = _list_dangerous(ast.parse(file.read_text(encoding="utf-8")))
        if names:
            found[f"{file.parts[-2]}/{file.name}"] = names
    assert found == ALLOWED


def _list_dangerous(tree: ast.Module) -> set[str]:
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {
        one.id if isinstance(one, ast.Name) else one.attr for one in called if isinstance(one, ast.Name | ast.Attribute)
    }
    attributes = {ast.unparse(one) for one in called if isinstance(one, ast.Attribute)}
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    pickles = {
        name for name in imports if re.fullmatch(r"(_?c?pickle|dill|cloudpickle|marshal|shelve|joblib)(\..*)?", name)
    }
    loads = {name for name in attributes if name in ("torch.load", "torch.save", "np.load", "numpy.load")}
    builtin = {one.id for one in called if isinstance(one, ast.Name)} & {"eval", "exec", "compile"}
    return builtin | (names & RUNS_WHAT_IT_READS - {"eval", "exec", "compile"}) | pickles | loads


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from torch.distributed import x\nx.all_gather_object(a, b)", "torch.load(path)", "eval(text)"],
)
def test_what_runs_what_it_reads_is_found(source: str) -> None:
    assert _list_dangerous(ast.parse(source))


def test_changes_leave_the_odd_values_as_they_are() -> None:
    """Otherwise they grow from one input to the next, until one of them contains itself."""
    chance, before = Random(0), repr(ODD_VALUES)
    for _ in range(2000):
        change([[1], {}], chance)
    assert repr(ODD_VALUES) == before


def test_an_error_of_another_kind_is_counted_as_such() -> None:
    outcomes = Outcomes()
    for error in (DboError("no"), ValueError("no"), SystemExit(1)):
        outcomes.observe(lambda error=error: _raise(error), "an input")  # type: ignore[misc]
    assert (outcomes.refused, len(outcomes.others)) == (2, 2)


def _raise(error: BaseException) -> None:
    raise error
