"""Options of models of sparse attention, and comparisons of their steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.support.ascend.jobs import answer_as_they_come, cut_at_boundaries, generate
from tests.support.ascend.reference import count_equal
from tests.support.vllm.engine import Answer, Engine
from tests.support.vllm.ranks import Ranks

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
SHARING: dict[str, Any] = {  # the first layer chooses for all three, and a layer that drafts once for all drafts
    "index_topk_freq": 3,
    "index_skip_topk_offset": 1,
    "index_share_for_mtp_iteration": True,
}
REUSING = {"hf_overrides": {"use_index_cache": True, **SHARING}}  # every layer has an indexer, of which one chooses
CUTS = [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES]
QUANTIZED = {"quantization": "ascend"}


def assert_steps_are_equal(npus: Ranks) -> None:
    """Compare prefills, a request cut inside, and decodes mixed with them."""
    assert_prefills_are_equal(npus, CUTS)
    assert_chunks_are_equal(npus, 400, 128)
    assert_mixed_steps_are_equal(npus)


def share_out(workers: int) -> dict[str, Any]:
    """Return options of as many workers, which share out the experts."""
    return {"tensor_parallel_size": workers, "enable_expert_parallel": workers > 1}


def assert_data_parallel_steps_are_equal(npus: Ranks, prompts: Any, arrive: Any) -> None:
    """Compare answers of steps that are cut where settings cut with those of unsplit ones."""
    unsplit_by_rank = npus.run(answer_as_they_come, prompts, 8, None, arrive)
    splits = npus.run(answer_as_they_come, prompts, 8, [], arrive)
    for (unsplit, _), (split, counts) in zip(unsplit_by_rank, splits, strict=True):
        assert counts[0]["split"] >= 4, counts
        assert count_equal(unsplit, split) == len(unsplit)


def share_rows() -> AbstractContextManager[Any]:
    """Let each micro-batch write to the first rows of the buffer of chosen keys."""
    from dbo_runtime.vllm_plugin.platforms.npu_metadata import complete_context

    def complete(part: Any, *rest: Any) -> None:
        complete_context(part, *rest)
        part.first_token = 0

    return patch("dbo_runtime.vllm_plugin.platforms.npu_metadata.complete_context", complete)


def answer_without(
    engine: Engine, rank: int, remove: Callable[[], AbstractContextManager[Any]], prompts: Any
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Answer in steps cut between requests, without a remedy."""
    cut_at_boundaries(engine, rank)
    with remove():
        return generate(engine, rank, prompts, 4)
