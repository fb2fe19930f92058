"""Speculative decoding inside vllm-ascend: the target's forward is split, and drafts are accepted as unsplit.

Drafts come from the trained MTP layer and the trained Eagle3 head of the tiny DeepSeek, so that many are accepted, and
from an n-gram lookup.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_tasks import held_out
from tests.support.ascend.drafts import TOKENS, assert_drafts_are_equal, leave_backend
from tests.support.ascend.engines import TINY, start
from tests.support.ascend.families import OPTIONS_OF
from tests.support.ascend.jobs import answer_as_they_come
from tests.support.ascend.mtp_layers import MTP, add_mtp_layer
from tests.support.ascend.reference import count_equal, tokenize
from tests.support.vllm.drafters import NGRAM, draft_by_eagle3, draft_by_mtp
from tests.support.vllm.families import make_family

GLM = "Glm4MoeForCausalLM"


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
