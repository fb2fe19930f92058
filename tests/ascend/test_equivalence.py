"""Split steps of vllm-ascend give what its own steps give.

The stand-in computes each row by itself, so equal means equal to the last bit: a batch cut between requests gives what
it gives unsplit, and a request cut inside gives what vllm-ascend gives when it prefills the request in two steps.
"""

from __future__ import annotations

import pytest

from examples.tiny_tasks import held_out
from tests.support.ascend.engines import TINY, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    PROMPTS,
    assert_chunks_are_equal,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
    assert_the_sanitizer_finds_nothing,
)
from tests.support.ascend.jobs import answer
from tests.support.ascend.reference import answer_in_float, count_equal, measure_error, tokenize
from tests.support.vllm.engine import find_difference
from tests.support.vllm.ranks import Ranks

WITHOUT_STAGES = ["two_npus", pytest.param("one_npu", marks=pytest.mark.slow)]
ENGINES = [
    *WITHOUT_STAGES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("two_stages", "stages_of_two")),
]


@pytest.mark.parametrize("engine", WITHOUT_STAGES)
def test_the_sanitizer_finds_nothing(engine: str, request: pytest.FixtureRequest) -> None:
    assert_the_sanitizer_finds_nothing(request.getfixturevalue(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefill_cut_at_any_request_boundary_is_equal_to_the_bit(engine: str, request: pytest.FixtureRequest) -> None:
    cuts = [[boundary] for boundary in BOUNDARIES] + [BOUNDARIES[:2], BOUNDARIES[1:], BOUNDARIES]
    assert_prefills_are_equal(request.getfixturevalue(engine), cuts)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("length", "size"), [(20, 15), (20, 3), (130, 128), (130, 77), (400, 201), (400, 100), (400, 83)]
)
def test_a_request_cut_inside_is_equal_to_one_prefilled_in_chunks(
    engine: str, length: int, size: int, request: pytest.FixtureRequest
) -> None:
    assert_chunks_are_equal(request.getfixturevalue(engine), length, size)


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_of_decodes_chunks_and_prefills_are_equal_to_the_bit(engine: str, request: pytest.FixtureRequest) -> None:
    """Prompts arrive while others decode, and do not all fit into one step: each step is cut between requests."""
    assert_mixed_steps_are_equal(request.getfixturevalue(engine))


def test_where_settings_cut_answers_are_as_good_as_unsplit_ones(two_npus: Ranks) -> None:
    """Against transformers in float32: split no further from it than unsplit, but for rounding."""
    prompts = [tokenize(TINY, [task.prompt for task in held_out(3)])]
    wanted = answer_in_float(TINY, prompts[0], 8)
    ((unsplit, _),) = two_npus.run(answer, prompts, 8)
    ((split, counts),) = two_npus.run(answer, prompts, 8, [])
    assert all(count["split"] >= 8 for count in counts), counts
    errors = [measure_error(wanted, found) for found in (unsplit, split)]
    assert errors[0] < 0.5, errors  # what bf16 makes of it
    assert errors[1] <= errors[0] + 0.01, errors
    assert count_equal(unsplit, split) == len(unsplit)


@pytest.mark.slow
def test_in_float32_steps_cut_between_requests_are_close() -> None:
    for npus in start(1, dtype="float32"):
        ((unsplit, _),) = npus.run(answer, [PROMPTS], 3)
        for boundary in BOUNDARIES:
            ((split, _),) = npus.run(answer, [PROMPTS], 3, [boundary])
            assert find_difference(unsplit, split) <= 1e-4
