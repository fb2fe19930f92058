"""Answers of the kit's engines, compared: what is equal, what a tie, and what no step was split for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dbo_runtime.batch import Batch
from tools.gpu_kit.parts.answers import MOST, Difference, compare, find_tolerance
from tools.gpu_kit.parts.engine import find_middle
from tools.gpu_kit.parts.equal import CUTS, EXACT, SHORT, Comparison
from tools.gpu_kit.parts.findings import Findings

ANSWERS = {"0": [{1: -0.5, 2: -1.0}, {3: -0.25, 4: -2.0}], "1": [{5: -0.1, 6: -3.0}]}


def change(request: str, position: int, **log_probs: float) -> dict[str, list[dict[int, float]]]:
    """Return the answers with other log-probabilities of one token."""
    changed: dict[str, list[dict[int, float]]] = json.loads(json.dumps(ANSWERS), object_hook=_with_numbers)
    changed[request][position] = {int(word[1:]): value for word, value in log_probs.items()}
    return changed


def _with_numbers(found: dict[str, Any]) -> dict[Any, Any]:
    is_words = all(isinstance(value, float) for value in found.values())
    return {int(word): value for word, value in found.items()} if is_words else found


def test_equal_answers_do_not_differ() -> None:
    assert compare(ANSWERS, change("1", 0, w5=-0.1, w6=-3.0), 0.0) == Difference(0.0, 0, 0)


def test_a_difference_is_the_largest_of_what_both_have() -> None:
    other = change("0", 1, w3=-0.375, w9=-7.0)
    assert compare(ANSWERS, other, 0.0) == Difference(0.125, 0, 0)


def test_another_token_is_a_tie_only_where_log_probabilities_are_close() -> None:
    other = change("0", 0, w1=-0.8, w2=-0.7)
    assert compare(ANSWERS, other, 0.05).others == 1
    assert compare(ANSWERS, other, 0.5) == Difference(pytest.approx(0.3), 0, 1)  # type: ignore[arg-type]


def test_after_another_token_the_rest_of_a_request_is_not_compared() -> None:
    other = change("0", 0, w1=-0.8, w2=-0.7)
    other["0"][1] = {3: -90.0, 4: -95.0}
    assert compare(ANSWERS, other, 0.5).largest < 1


def test_a_token_that_was_not_among_the_best_is_no_tie() -> None:
    assert compare(ANSWERS, change("1", 0, w7=-0.1, w5=-0.15), 0.5).others == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_never_equal(value: float) -> None:
    broken = change("0", 1, w3=value, w4=-2.0)
    for one, other in ((ANSWERS, broken), (broken, ANSWERS), (broken, broken)):
        with pytest.raises(ValueError, match="request 0 has log-probabilities that are no finite numbers"):
            compare(one, other, MOST)


def test_what_rounding_explains_follows_from_unsplit_answers_within_bounds() -> None:
    assert find_tolerance(0.0, "bfloat16") == 0.05
    assert find_tolerance(0.1, "bfloat16") == pytest.approx(0.2)
    assert find_tolerance(3.0, "float32") == MOST


@pytest.mark.parametrize(
    ("query_lens", "cuts"),
    [((300, 17, 1701), [317]), ((1, 1, 1, 260), [3]), ((1, 1, 1, 1), [2]), ((2030,), []), ((4, 4, 0), [4])],
    ids=str,
)
def test_a_step_is_cut_between_requests_near_its_middle(query_lens: tuple[int, ...], cuts: list[int]) -> None:
    assert find_middle(Batch(query_lens, 0)) == cuts


def test_each_flag_names_cuts_that_there_are() -> None:
    assert all(set(names) <= set(CUTS[device]) for names in EXACT.values() for device in CUTS)


class FakeEngine:
    """Gives answers in turn; each step is split where settings say so."""

    cuts_prompts = True
    is_compiled = True

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.split = 0
        self.is_split = False
        self.ways: list[Any] = []

    def configure(self, settings: dict[str, str], cuts: Any = None) -> None:
        self.is_split = settings["DBO_MODE"] == "always"

    def count(self) -> dict[str, Any]:
        return {"split": self.split, "declined": {}}

    def answer(self, *_: Any, **__: Any) -> Any:
        self.split += self.is_split
        return self._answers.pop(0)

    @contextmanager
    def with_short_steps(self, tokens: int) -> Iterator[None]:
        self.ways.append(tokens)
        yield

    @contextmanager
    def without_compilation(self) -> Iterator[None]:
        self.ways.append("not compiled")
        yield


FAR, FARTHER = change("0", 1, w3=-0.26, w4=-2.0), change("0", 1, w3=-0.9, w4=-2.0)


def compare_with(
    folder: Path, patch: pytest.MonkeyPatch, engine: FakeEngine, is_exact: bool = False
) -> tuple[Comparison, Findings]:
    """Return what the engine's last answers, split ones, are found to be."""
    patch.setattr("tools.gpu_kit.parts.equal.answer", engine.answer)
    findings = Findings(folder / "result.json")
    comparison = Comparison(findings, engine, "cuda", "bfloat16", is_exact)  # type: ignore[arg-type]
    comparison.add("by settings", None, {"DBO_MODE": "always"})
    return comparison, findings


@pytest.mark.parametrize(
    ("found", "is_equal"),
    [(ANSWERS, True), (FAR, True), (FARTHER, False)],
    ids=["equal to the bit", "within rounding", "beyond rounding"],
)
def test_split_answers_are_equal_or_the_part_fails(
    found: Any, is_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(*[ANSWERS] * 6, found)
    comparison, findings = compare_with(tmp_path, monkeypatch, engine)
    assert comparison.is_equal is is_equal
    assert bool(findings.failed) is not is_equal
    assert findings.found["split by settings"]["split steps"] == comparison.steps == 1


@pytest.mark.parametrize("way", range(4), ids=["alone", "long steps", "short steps", "not compiled"])
def test_rounding_is_what_any_way_of_vllms_own_differs_by(
    way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise: list[Any] = [ANSWERS] * 4
    noise[way] = change("0", 1, w3=-0.45, w4=-2.0)
    engine = FakeEngine(ANSWERS, ANSWERS, *noise, change("0", 1, w3=-0.6, w4=-2.0))
    comparison, findings = compare_with(tmp_path, monkeypatch, engine)
    assert comparison.is_equal
    assert findings.found["tolerance"] == pytest.approx(0.4)
    assert engine.ways == [*SHORT["cuda"], "not compiled"]


@pytest.mark.parametrize(("alone", "is_equal"), [(ANSWERS, False), (FAR, True)])
def test_kernels_that_take_no_notice_of_the_batch_may_differ_by_what_vllms_own_answers_do(
    alone: Any, is_equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, _ = compare_with(tmp_path, monkeypatch, FakeEngine(ANSWERS, ANSWERS, alone, FAR), is_exact=True)
    assert comparison.is_equal is is_equal


@pytest.mark.parametrize("cuts", [None, (5, 10)])
def test_answers_that_no_step_was_split_for_prove_nothing(
    cuts: tuple[int, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(*[ANSWERS] * 4)
    monkeypatch.setattr("tools.gpu_kit.parts.equal.answer", engine.answer)
    findings = Findings(tmp_path / "result.json")
    comparison = Comparison(findings, engine, "cpu", "float32", is_exact=True)  # type: ignore[arg-type]
    comparison.add("by settings", cuts, {"DBO_MODE": "off"})
    assert not comparison.is_equal
    assert findings.failed == ["by settings: no step was split"]
