"""Compare two answers to one request: log-probabilities first, then results that follow from them; or pooled data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.lab.soak.answer import Answer, Completion, LogProbs
from dbo_runtime.lab.soak.request import Request

TOLERANCE = 1e-4  # for log-probabilities in float32, where shapes of matrix products differ
TOKEN, POOLED, FAILURE, ALARM = "token", "pooled", "failure", "alarm"


class Difference(NamedTuple):
    """The first place where two answers differ.

    Attributes:
        kind: kind of difference: `log-probability`, `prompt log-probability`, `token`, `length`, `finish`, `text`,
            `answers`, `refusal`, `pooled`; `failure` if the engine failed, `alarm` if the comparison of first steps
            raised one.
        completion: index of the request's answer.
        position: position of the token, or of the row of pooled numbers; None for a difference of the whole answer.
        detail: both values, in words.
    """

    kind: str
    completion: int | None
    position: int | None
    detail: str

    def __str__(self) -> str:
        """Format as one line."""
        where = "" if self.completion is None else f" of answer {self.completion}"
        where += "" if self.position is None else f" at token {self.position}"
        return f"{self.kind}{where}: {self.detail}"


class Comparison(NamedTuple):
    """The result of comparing an answer with the expected one.

    Attributes:
        difference: the first difference; None if there is none, or only a tie.
        tie: position after which greedy answers differ because two tokens were equally likely; None if there is none.
        largest: largest difference of any log-probability up to there, or of any pooled number.
    """

    difference: Difference | None = None
    tie: int | None = None
    largest: float = 0.0


def compare_answers(request: Request, expected: Answer, actual: Answer, tolerance: float = TOLERANCE) -> Comparison:
    """Compare all parts that two answers have in common. Answers of aborted requests may differ in length."""
    if expected.refusal != actual.refusal:
        detail = f"{expected.refusal or 'taken'} / {actual.refusal or 'taken'}"
        return Comparison(Difference("refusal", None, None, detail))
    may_be_shorter = request.leaves is not None
    if len(expected.completions) != len(actual.completions) and not may_be_shorter:
        detail = f"{len(expected.completions)} / {len(actual.completions)}"
        return Comparison(Difference("answers", None, None, detail))
    found = [
        _compare_prompts(request, expected, actual, tolerance),
        _compare_pooled(request, expected, actual, tolerance),
    ]
    pairs = zip(expected.completions, actual.completions, strict=False)
    found += [_compare_completions(request, number, *pair, tolerance) for number, pair in enumerate(pairs)]
    return Comparison(
        next((each.difference for each in found if each.difference is not None), None),
        next((each.tie for each in found if each.tie is not None), None),
        max(each.largest for each in found),
    )


def compare_log_probs(expected: LogProbs, actual: LogProbs, asked: int) -> float:
    """Return the largest difference of log-probabilities of the same token; infinite if only one is a number.

    Each side has those of its *asked* most likely tokens, and of its chosen token. A token that only one side has is
    compared with the least likely token in the other side's list, which it cannot exceed.
    """
    largest = 0.0
    for one, other in ((expected, actual), (actual, expected)):
        floor = _find_floor(other, asked)
        for token, log_prob in one.items():
            if token in other:
                largest = max(largest, _subtract(log_prob, other[token]))
            elif not log_prob <= floor:
                largest = max(largest, _subtract(log_prob, floor))
    return largest


def _find_floor(log_probs: LogProbs, asked: int) -> float:
    """Return the least likely of the *asked* most likely. A token outside the list is at most as likely."""
    highest = sorted(log_probs.values(), reverse=True)[:asked]
    return highest[-1] if highest else -math.inf


def _subtract(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):  # also covers infinite numbers
        return 0.0
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


def _compare_prompts(request: Request, expected: Answer, actual: Answer, tolerance: float) -> Comparison:
    one, other = expected.prompt_log_probs, actual.prompt_log_probs
    if one is None or other is None:
        if one is other or request.leaves is not None:
            return Comparison()
        return Comparison(Difference("prompt log-probability", None, None, "only one answer has them"))
    if len(one) != len(other):
        return Comparison(Difference("prompt log-probability", None, None, f"{len(one)} / {len(other)} of them"))
    largest = 0.0
    for position, (a, b) in enumerate(zip(one, other, strict=True)):
        if (a is None) != (b is None):
            return Comparison(Difference("prompt log-probability", None, position, "only one answer has it"))
        off = compare_log_probs(a or {}, b or {}, request.sampling["prompt_logprobs"])
        largest = max(largest, off)
        if off > tolerance:
            detail = f"differs by {off:.2e}: {_show(a or {})} / {_show(b or {})}"
            return Comparison(Difference("prompt log-probability", None, position, detail), None, largest)
    return Comparison(largest=largest)


def _compare_pooled(request: Request, expected: Answer, actual: Answer, tolerance: float) -> Comparison:
    """Compare row by row, in units of the row's largest number if that is more than 1."""
    one, other = expected.pooled, actual.pooled
    if one is None or other is None:
        if one is other or request.leaves is not None:
            return Comparison()
        return Comparison(Difference(POOLED, None, None, "only one answer is there"))
    shapes = [(len(rows), sorted({len(row) for row in rows})) for rows in (one, other)]
    if shapes[0] != shapes[1]:
        return Comparison(Difference(POOLED, None, None, f"{shapes[0]} / {shapes[1]} rows and numbers in each"))
    largest = 0.0
    for position, (a, b) in enumerate(zip(one, other, strict=True)):
        scale = max([1.0, *(abs(number) for number in a if math.isfinite(number))])
        off = max((_subtract(*pair) for pair in zip(a, b, strict=True)), default=0.0) / scale
        largest = max(largest, off)
        if off > tolerance:
            detail = f"differs by {off:.2e}: {_show_row(a)} / {_show_row(b)}"
            return Comparison(Difference(POOLED, None, position, detail), None, largest)
    return Comparison(largest=largest)


def _compare_completions(
    request: Request, number: int, expected: Completion, actual: Completion, tolerance: float
) -> Comparison:
    largest = 0.0
    for position, (one, other) in enumerate(zip(expected.log_probs, actual.log_probs, strict=False)):
        off = compare_log_probs(one, other, request.sampling["logprobs"])
        largest = max(largest, off)
        a, b = expected.tokens[position], actual.tokens[position]
        if off > tolerance:
            detail = f"differs by {off:.2e}: token {a} of {_show(one)} / token {b} of {_show(other)}"
            return Comparison(Difference("log-probability", number, position, detail), None, largest)
        if a != b:
            before = expected.tokens[:position]
            apart = abs(request.score(a, one[a], before) - request.score(b, other[b], before))
            if request.is_greedy and apart < tolerance:
                return Comparison(None, position, largest)
            detail = f"{a} of {_show(one)} / {b} of {_show(other)}, log-probabilities within {off:.1e}"
            return Comparison(Difference(TOKEN, number, position, detail), None, largest)
    return Comparison(_compare_ends(request, number, expected, actual), None, largest)


def _compare_ends(request: Request, number: int, expected: Completion, actual: Completion) -> Difference | None:
    """Compare the ends of answers whose tokens are equal as far as both have them."""
    if request.leaves is not None and None in (expected.finish, actual.finish):
        return None
    if len(expected.tokens) != len(actual.tokens):
        return Difference("length", number, None, f"{len(expected.tokens)} / {len(actual.tokens)} tokens")
    ends = [(each.finish, each.stop) for each in (expected, actual)]
    if ends[0] != ends[1]:
        return Difference("finish", number, None, f"{ends[0]} / {ends[1]}")
    if expected.text != actual.text:
        return Difference("text", number, None, f"{expected.text!r} / {actual.text!r}")
    return None


def _show(log_probs: LogProbs, shown: int = 4) -> str:
    best: Sequence[tuple[int, float]] = sorted(log_probs.items(), key=lambda item: -item[1])[:shown]
    return "{" + ", ".join(f"{token}: {log_prob:.6f}" for token, log_prob in best) + "}"


def _show_row(row: Sequence[float], shown: int = 4) -> str:
    return "[" + ", ".join(f"{number:.6f}" for number in row[:shown]) + (", ...]" if len(row) > shown else "]")
