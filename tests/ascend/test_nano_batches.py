"""Nano-batches inside vllm-ascend: attention keeps the step's metadata, and the other ops have contexts without any."""

from __future__ import annotations

import pytest

from tests.support.ascend.equivalence import PROMPTS
from tests.support.ascend.jobs import answer, answer_in_nano_batches, make_prompts
from tests.support.vllm.engine import find_difference
from tests.support.vllm.ranks import Ranks


@pytest.mark.parametrize("count", [2, 5])
def test_tensor_parallel_steps_are_equal_to_the_bit(two_npus: Ranks, count: int) -> None:
    """The stand-in computes each row by itself, in prefills and in decodes."""
    ((unsplit, _),) = two_npus.run(answer, [PROMPTS], 4)
    ((nano, steps),) = two_npus.run(answer_in_nano_batches, [PROMPTS], 4, count)
    assert min(steps) >= (4 if count <= len(PROMPTS) else 1), steps
    assert find_difference(unsplit, nano) == 0.0


def test_tokens_are_dispatched_to_experts_on_other_ranks(expert_npus: Ranks) -> None:
    prompts = [make_prompts(40, 30, 25, 5), make_prompts(30, 20, 9)]
    unsplit_by_rank = expert_npus.run(answer, prompts, 4)
    nano_by_rank = expert_npus.run(answer_in_nano_batches, prompts, 4, 2)
    for (unsplit, _), (nano, steps) in zip(unsplit_by_rank, nano_by_rank, strict=True):
        assert min(steps) > 0, steps
        assert find_difference(unsplit, nano) == 0.0


@pytest.mark.parametrize("check", ["1", "races"])
def test_checks_find_nothing(two_npus: Ranks, check: str) -> None:
    ((_, steps),) = two_npus.run(answer_in_nano_batches, [PROMPTS], 3, 3, check)
    assert min(steps) > 0, steps
