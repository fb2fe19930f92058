"""Each reason to decline that the code has is in the doctor's table of remedies, and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbo_runtime.lab.doctor import serve_command
from dbo_runtime.lab.doctor.remedies import REMEDIES, find_remedies, is_one_of
from dbo_runtime.lab.doctor.serve_command import ServeCommand, check_serve_command
from tests.support.serve_facts import FACTS

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for folder in (ROOT / "dbo_runtime", ROOT / "models")
    for path in folder.rglob("*.py")
    # What the laboratory declines is an error of a command; but a server calibrates, too.
    if "lab" not in path.relative_to(ROOT).parts or path.parent.name == "calibrate"
)
LISTS = (
    "features",
    "checks",
    "unsupported",
    "of_micro_batches",
)  # variables with pairs (is_used, what) of which reasons are made


class Reasons(ast.NodeVisitor):
    """The reasons in one module; what varies in them is `*`."""

    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text())
        self._parts = [part for value in self._assigned(*LISTS) for part in self._list_pairs(value)]
        self.found: set[str] = set()
        self.visit(self._tree)

    def visit_Call(self, call: ast.Call) -> None:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in ("Decline", "DeclineError") and call.args:
            self.found |= {*self._read(call.args[0])}
        self.generic_visit(call)

    def _read(self, node: ast.expr) -> Iterator[str]:
        """Yield the texts that an expression may have; none for the reason of another decline."""
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=[*first, ast.FormattedValue(value=ast.Name(id="what"))]):
                yield from ("".join(map(self._read_part, first)) + part for part in self._parts)
            case ast.JoinedStr(values=values):
                yield "".join(map(self._read_part, values))
            case ast.IfExp(body=body, orelse=other):
                yield from (*self._read(body), *self._read(other))
            case ast.Name(id="what"):
                yield from self._parts
            case ast.Name(id=name):
                yield from (text for value in self._assigned(name) for text in self._read(value))
            case ast.Call(func=ast.Name(id=name)):
                functions = (node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef))
                bodies = (function for function in functions if function.name == name)
                ends = (end for body in bodies for end in ast.walk(body) if isinstance(end, ast.Return) and end.value)
                yield from (text for end in ends if end.value for text in self._read(end.value))

    def _read_part(self, part: ast.expr) -> str:
        return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "*"

    def _assigned(self, *names: str) -> Iterator[ast.expr]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
                yield node.value

    def _list_pairs(self, value: ast.expr) -> Iterator[str]:
        for pair in value.elts if isinstance(value, ast.Tuple) else ():
            if isinstance(pair, ast.Tuple):
                yield from self._read(pair.elts[1])


@pytest.fixture(scope="module")
def reasons() -> set[str]:
    """Return all reasons in the code."""
    return set().union(*(Reasons(path).found for path in SOURCES))


def test_the_code_has_reasons_that_are_constants_texts_with_a_name_and_parts_of_lists(reasons: set[str]) -> None:
    assert len(reasons) >= 170
    assert {"nowhere to cut", "there is no device for *", "not supported yet: FlashComm 2"} <= reasons
    assert {"its forward does more than that of its backbone", "no images", "latent attention is sparse"} <= reasons


def test_each_reason_has_one_remedy(reasons: set[str]) -> None:
    assert {reason: len(find_remedies(reason)) for reason in reasons if len(find_remedies(reason)) != 1} == {}


def test_each_remedy_has_a_reason(reasons: set[str]) -> None:
    phrases = {phrase for group in REMEDIES.values() for remedy in group for phrase in remedy.reasons}
    assert {phrase for phrase in phrases if not any(is_one_of(reason, phrase) for reason in reasons)} == set()


def test_a_reason_is_found_with_its_detail_and_another_is_not() -> None:
    (remedy,) = find_remedies("not supported yet: LoRA on 'npu' (rank 3)")
    assert remedy.action.startswith("serve merged weights")
    assert find_remedies("the moon is full") == []


def test_the_doctor_says_what_to_do_about_what_prevents_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    declines = ["vllm-ascend is not installed", "something new"]
    monkeypatch.setattr(serve_command, "run_probe", lambda *_: {**FACTS, "declines": declines})
    _, known, unknown = check_serve_command(ServeCommand({}, ("DIR",)), {})
    assert known.remedy == "install vllm-ascend 0.30.0rc2: docs/quickstart-ascend.md"
    assert unknown.remedy == ""


def test_the_page_on_troubleshooting_has_the_remedies_of_all_groups() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for group, remedies in REMEDIES.items():
        table = page.partition(f"<!-- remedies: {group} -->")[2].partition(f"<!-- /remedies: {group} -->")[0]
        assert all(f"`{phrase}`" in table for remedy in remedies for phrase in remedy.reasons), group
