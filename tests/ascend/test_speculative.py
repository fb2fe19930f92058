"""Speculative decoding inside vllm-ascend: the target's forward is split, and drafts are accepted as unsplit.

Drafts come from the trained MTP layer and the trained Eagle3 head of the tiny DeepSeek, so that many are accepted, and
from an n-gram lookup.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_tasks import held_out
from tests.ascend.conftest import TINY, start
from tests.ascend.test_families import OPTIONS_OF
from tests.support.ascend.jobs import answer_as_they_come, cut_at_boundaries, generate, make_prompts
from tests.support.ascend.mtp_layers import MTP, add_mtp_layer
from tests.support.ascend.reference import count_equal, tokenize
from tests.support.vllm.drafters import NGRAM, draft_by_eagle3, draft_by_mtp
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.families import make_family
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.speculation import count_drafts

GLM = "Glm4MoeForCausalLM"

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


DRAFTERS = {"ngram": {"speculative_config": NGRAM}, "mtp": draft_by_mtp(2), "eagle3": draft_by_eagle3(3)}
CASES = [(name, workers) for name in DRAFTERS for workers in (1, 2) if (name, workers) != ("mtp", 1)]


@pytest.mark.parametrize(
    ("name", "workers"), [("mtp", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_split_steps_with_drafts_are_equal_to_unsplit_ones(name: str, workers: int) -> None:
    options = {"tensor_parallel_size": workers, "enable_expert_parallel": workers > 1, **leave_backend(DRAFTERS[name])}
    for npus in start(1, **options):
        assert_drafts_are_equal(npus, accepts=False)


@pytest.mark.slow
def test_drafts_of_an_mtp_layer_of_glm_are_accepted_alike(tmp_path: Path) -> None:
    model = add_mtp_layer(make_family(GLM, tmp_path))
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **OPTIONS_OF[GLM], **MTP}
    for npus in start(1, model, **options):
        assert_drafts_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_verify_drafts_alike() -> None:
    """They agree on sizes alone, so decodes are cut inside; one rank runs dummy batches with the other in the end."""
    tasks = tokenize(TINY, [task.prompt for task in held_out(4)])
    prompts, arrive = [tasks[:10], tasks[10:14]], [(0, 0, 1, 2, 3, 3, 3, 4, 5, 5), (0, 2, 2, 5)]
    for npus in start(2, **leave_backend(draft_by_mtp(2))):
        unsplit_by_rank = npus.run(answer_as_they_come, prompts, TOKENS, None, arrive)
        for cuts in ([], [[4], [5]], [[2], [7]]):
            splits = npus.run(answer_as_they_come, prompts, TOKENS, cuts, arrive)
            for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
                assert counts[0]["split"] >= 4, counts
                assert "cannot be cut where all ranks agreed to" not in counts[0]["declined"], counts
                assert count_equal(unsplit, split) == len(unsplit), cuts
