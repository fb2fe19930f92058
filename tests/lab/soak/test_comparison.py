"""How two answers are compared, held against what was done to one of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.lab.soak.answer import Answer, Completion
from dbo_runtime.lab.soak.comparison import TOLERANCE, compare_answers, compare_log_probs
from dbo_runtime.lab.soak.request import Prompt, Request

VOCABULARY, ASKED = 12, 3
Rows = list[list[float]]  # log-probabilities of the whole vocabulary at each position


def ask(**sampling: Any) -> Request:
    return Request(Prompt(4, 0), {"temperature": 0.0, "max_tokens": 8, "logprobs": ASKED, **sampling})


def draw_rows(seed: int, count: int) -> Rows:
    """Return rows whose log-probabilities are at least 100 tolerances apart."""
    rng = random.Random(seed)
    return [rng.sample([-0.1 - 0.05 * step for step in range(60)], VOCABULARY) for _ in range(count)]


def answer(rows: Rows, **fields: Any) -> Answer:
    """Return the greedy answer that a model with these rows gives."""
    tokens, kept = [], []
    for row in rows:
        ranked = sorted(range(VOCABULARY), key=lambda token, row=row: -row[token])
        tokens.append(ranked[0])
        kept.append({token: row[token] for token in ranked[:ASKED]})
    return Answer([Completion(tokens, kept, "text", **{"finish": "length", **fields})])


def disturb(rows: Rows, seed: int, size: float) -> Rows:
    rng = random.Random(seed)
    return [[value + rng.uniform(-size, size) for value in row] for row in rows]


@given(st.integers(), st.integers(), st.integers(1, 6))
def test_rounding_is_no_difference(seed: int, other: int, count: int) -> None:
    rows = draw_rows(seed, count)
    found = compare_answers(ask(), answer(rows), answer(disturb(rows, other, 0.9 * TOLERANCE)))
    assert found.difference is None
    assert found.tie is None
    assert 0 < found.largest <= 0.9 * TOLERANCE


@given(st.integers(), st.integers(0, 5), st.integers(0, ASKED - 1), st.floats(1.5, 30), st.sampled_from([-1, 1]))
def test_a_log_probability_that_is_off_is_found_where_it_is(
    seed: int, position: int, rank: int, tolerances: float, sign: int
) -> None:
    """By less than tokens are apart, so that the order stays."""
    rows = draw_rows(seed, 6)
    changed = [list(row) for row in rows]
    token = sorted(range(VOCABULARY), key=lambda token: -rows[position][token])[rank]
    changed[position][token] += sign * tolerances * TOLERANCE
    for one, other in ((rows, changed), (changed, rows)):
        found = compare_answers(ask(), answer(one), answer(other))
        assert found.difference is not None
        assert (found.difference.kind, found.difference.position) == ("log-probability", position)
        assert found.largest == pytest.approx(tolerances * TOLERANCE)


@given(st.integers(), st.integers(0, 5), st.floats(0.01, 0.4))
def test_a_tie_ends_the_comparison(seed: int, position: int, gap: float) -> None:
    """Two tokens are nearly as likely, and rounding turns them round; what follows has nothing in common."""
    rows = draw_rows(seed, 6)
    best, second, *_ = sorted(range(VOCABULARY), key=lambda token: -rows[position][token])
    one, other = (list(map(list, rows[: position + 1])) for _ in range(2))
    one[position][second] = one[position][best] - gap * TOLERANCE
    other[position][best], other[position][second] = one[position][second], one[position][best] + 1e-7
    found = compare_answers(ask(), answer(one + draw_rows(1, 3)), answer(other + draw_rows(2, 5)))
    assert found.difference is None
    assert found.tie == position


@given(st.integers(), st.integers(0, 3))
def test_another_token_with_the_same_log_probabilities_is_a_difference(seed: int, position: int) -> None:
    expected = answer(draw_rows(seed, 4))
    (completion,) = expected.completions
    tokens = list(completion.tokens)
    tokens[position] = min(completion.log_probs[position], key=lambda token: completion.log_probs[position][token])
    actual = replace(expected, completions=[replace(completion, tokens=tokens)])
    found = compare_answers(ask(), expected, actual).difference
    assert found is not None
    assert (found.kind, found.position) == ("token", position)


def test_biases_and_penalties_count_at_a_tie() -> None:
    """Token 0 is more likely by 1, token 1 has a bias of 1: either may be taken."""
    log_probs = [{0: -1.0, 1: -2.0}]
    one, other = (Answer([Completion([token], log_probs, "", "length")]) for token in (0, 1))
    assert compare_answers(ask(logit_bias={1: 1.0}), one, other).tie == 0
    assert compare_answers(ask(logit_bias={1: 1.5}), one, other).difference is not None
    assert compare_answers(ask(), one, other).difference is not None
    one, other = (Answer([Completion([0, token], [{0: -0.5}, {0: -1.0, 1: -2.0}])]) for token in (0, 1))
    assert compare_answers(ask(frequency_penalty=0.4, presence_penalty=0.6), one, other).tie == 1


def test_chance_is_no_tie() -> None:
    log_probs = [{0: -1.0, 1: -1.0}]
    one, other = (Answer([Completion([token], log_probs, "", "length")]) for token in (0, 1))
    assert compare_answers(ask(), one, other).tie == 0
    found = compare_answers(ask(temperature=0.5, seed=3), one, other).difference
    assert found is not None
    assert found.kind == "token"
    assert compare_answers(ask(temperature=0.5, top_k=1), one, other).tie == 0  # which leaves nothing to chance


@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"finish": "stop"}, "finish"), ({"stop": 7}, "finish"), ({"text": "another"}, "text")],
)
def test_ends_are_compared(changed: dict[str, Any], kind: str) -> None:
    expected = answer(draw_rows(0, 3))
    (completion,) = expected.completions
    actual = replace(expected, completions=[replace(completion, **changed)])
    found = compare_answers(ask(), expected, actual).difference
    assert found is not None
    assert found.kind == kind


def test_a_shorter_answer_is_a_difference_but_of_an_aborted_request() -> None:
    rows = draw_rows(0, 4)
    full, part = answer(rows), answer(rows[:2], finish=None)
    found = compare_answers(ask(), full, part).difference
    assert found is not None
    assert found.kind == "length"
    aborted = replace(ask(), leaves=3)
    assert compare_answers(aborted, full, part).difference is None
    assert compare_answers(aborted, full, Answer()).difference is None
    assert compare_answers(aborted, full, answer(rows[:2])).difference is not None  # which was not aborted, but ended
    off = compare_answers(aborted, full, answer(draw_rows(1, 2), finish=None)).difference
    assert off is not None


def test_missing_answers_and_refusals_are_differences() -> None:
    expected = answer(draw_rows(0, 2))
    found = compare_answers(ask(), expected, Answer()).difference
    assert found is not None
    assert found.kind == "answers"
    refused = Answer(refusal="ValueError: no")
    for one, other in ((expected, refused), (refused, expected)):
        found = compare_answers(ask(), one, other).difference
        assert found is not None
        assert found.kind == "refusal"


def test_log_probabilities_of_prompts_are_compared() -> None:
    request = ask(prompt_logprobs=2)
    expected = replace(answer(draw_rows(0, 2)), prompt_log_probs=[None, {3: -1.0, 4: -2.0}, {5: -1.0, 4: -3.0}])
    assert compare_answers(request, expected, expected).difference is None
    off = replace(expected, prompt_log_probs=[None, {3: -1.0, 4: -2.0}, {5: -1.001, 4: -3.0}])
    found = compare_answers(request, expected, off)
    assert found.difference is not None
    assert (found.difference.kind, found.difference.position) == ("prompt log-probability", 2)
    for wrong in (None, [None, {3: -1.0, 4: -2.0}], [None, None, {5: -1.0, 4: -3.0}]):
        assert compare_answers(request, expected, replace(expected, prompt_log_probs=wrong)).difference is not None


def test_of_tokens_that_only_one_list_has_those_count_that_are_too_likely_for_the_other() -> None:
    at_the_end = ({1: -1.0, 2: -2.0, 3: -2.00001}, {1: -1.0, 2: -2.0, 4: -2.00001})
    assert compare_log_probs(*at_the_end, asked=3) <= TOLERANCE
    assert compare_log_probs({1: -1.0, 2: -2.0}, {1: -1.0, 3: -2.5}, asked=2) == pytest.approx(0.5)
    chosen = ({1: -1.0, 2: -2.0, 9: -7.0}, {1: -1.0, 2: -2.0})  # beyond those that were asked for
    assert compare_log_probs(*chosen, asked=2) == 0


def test_what_is_no_number_differs_from_what_is_one() -> None:
    assert compare_log_probs({1: math.nan}, {1: -1.0}, asked=1) == math.inf
    assert compare_log_probs({1: -1.0}, {2: math.nan}, asked=1) == math.inf
    assert compare_log_probs({1: -math.inf}, {1: -1.0}, asked=1) == math.inf
    assert compare_log_probs({1: -math.inf, 2: math.nan}, {1: -math.inf, 2: math.nan}, asked=2) == 0


POOL = Request(Prompt(4, 0), {}, pooling={"task": "token_embed"})


@given(st.integers(), st.integers(0, 3), st.integers(0, 7), st.sampled_from([1.5, -30.0, math.nan, math.inf]))
def test_a_pooled_number_that_is_off_is_found_in_its_row(seed: int, row: int, place: int, tolerances: float) -> None:
    rng = random.Random(seed)
    rows = [[rng.uniform(-1, 1) for _ in range(8)] for _ in range(4)]
    close = [[number + rng.uniform(-0.9, 0.9) * TOLERANCE for number in each] for each in rows]
    found = compare_answers(POOL, Answer(pooled=rows), Answer(pooled=close))
    assert found.difference is None
    assert 0 < found.largest <= TOLERANCE
    changed = [list(each) for each in rows]
    changed[row][place] += tolerances * TOLERANCE
    for one, other in ((rows, changed), (changed, rows)):
        difference = compare_answers(POOL, Answer(pooled=one), Answer(pooled=other)).difference
        assert difference is not None
        assert (difference.kind, difference.position) == ("pooled", row)


def test_large_pooled_numbers_are_compared_in_units_of_the_largest() -> None:
    rows, other = [[100.0, 1.0]], [[100.0, 1.0 + 50 * TOLERANCE]]
    found = compare_answers(POOL, Answer(pooled=rows), Answer(pooled=other))
    assert found.difference is None
    assert found.largest == pytest.approx(0.5 * TOLERANCE)
    assert compare_answers(POOL, Answer(pooled=[[1.0, 1.0]]), Answer(pooled=[[1.0, 1.0 + 50 * TOLERANCE]])).difference


def test_pooled_rows_that_are_missing_are_a_difference_but_of_an_aborted_request() -> None:
    rows = Answer(pooled=[[1.0, 2.0], [3.0, 4.0]])
    for wrong in (Answer(), Answer(pooled=[[1.0, 2.0]]), Answer(pooled=[[1.0], [3.0]])):
        found = compare_answers(POOL, rows, wrong).difference
        assert found is not None
        assert found.kind == "pooled"
    assert compare_answers(replace(POOL, leaves=2), rows, Answer()).difference is None
    assert compare_answers(replace(POOL, leaves=2), Answer(), Answer()).difference is None
