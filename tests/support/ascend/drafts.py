"""Comparisons of steps inside vllm-ascend in which drafts are verified."""

from __future__ import annotations

from collections import Counter
from typing import Any

from examples.tiny_tasks import held_out
from tests.support.ascend.engines import TINY
from tests.support.ascend.jobs import cut_at_boundaries, generate, make_prompts
from tests.support.ascend.reference import tokenize
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.speculation import count_drafts

TASKS = tokenize(TINY, [task.prompt for task in held_out(1)])
PROMPTS = [*make_prompts(96, 64, 160, 128, 80), *TASKS]
ARRIVE = (0, 0, 2, 2, 3, *range(len(TASKS)))  # the later ones while the first are decoding
TOKENS = 8


def leave_backend(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of an engine whose drafter, too, attends as vllm-ascend chooses."""
    return {**options, "speculative_config": {**options["speculative_config"], "attention_backend": None}}


def answer_with_drafts(engine: Engine, rank: int, split: bool) -> tuple[list[Answer], Counter[str], int]:
    """Return the answers, the counts of drafts, and how many steps were split, each at a boundary of requests."""
    if split:
        cut_at_boundaries(engine, rank)
    else:
        engine.cut_by_settings()  # cuts that an earlier comparison chose hold whatever the mode is
        engine.configure(DBO_MODE="off")
    with count_drafts(engine) as counts:
        answers, (steps, *_) = generate(engine, rank, [PROMPTS], TOKENS, ARRIVE)
    return answers, counts, steps["split"]


def assert_drafts_are_equal(npus: Ranks, steps: int = 10, accepts: bool = True) -> Counter[str]:
    """Compare at least *steps* split steps in which drafts are verified with unsplit ones; return the counts of drafts.

    If it *accepts* drafts, some are accepted and some are not.
    """
    ((unsplit, drafts, none),) = npus.run(answer_with_drafts, False)
    ((split, split_drafts, count),) = npus.run(answer_with_drafts, True)
    assert (none, count >= steps) == (0, True)
    assert drafts["drafted"] > (drafts["accepted"] if accepts else 0)
    assert drafts["accepted"] > 0 or not accepts
    assert split_drafts == drafts
    assert find_difference(unsplit, split) == 0.0
    found: Counter[str] = drafts
    return found
