"""Pipelines on prefill nodes whose last stage drafts, split as unsplit: answers, and the keys that are handed on.

A prefill node answers each request with one token: what it is there for are the caches, those of the layer that drafts
among them. On other nodes vllm-ascend's patch of the scheduler fails, so those are declined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ascend.context_parallel import SHARED_OUT
from tests.support.ascend.drafts import leave_backend
from tests.support.ascend.engines import FOUR, PIPELINE, TINY, start
from tests.support.ascend.jobs import Prompts, answer, cut_at_boundaries, generate, make_prompts
from tests.support.ascend.mtp_layers import DRAFTS
from tests.support.ascend.quantized_caches import BOTH, PRODUCER, make_model
from tests.support.ascend.sparse_attention import QUANTIZED
from tests.support.vllm.drafters import draft_by_mtp
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.ranks import Ranks

PROMPTS = make_prompts(40, 130, 64, 300, 9, 301, 77, 20)
ARRIVE = (0, 0, 0, 1, 1, 1, 3, 3)  # steps of several requests, some of which do not fit
RECORDED = {"DBO_KV_CONNECTORS": "HookRecorder"}

Sums = dict[str, list[float]]
"""By the name of a layer, what each slot of its caches sums up to, sorted: which slots are taken, differs."""


def answer_and_read(
    engine: Engine, rank: int, split: bool, prompts: Prompts
) -> tuple[list[Answer], list[int], list[Sums]]:
    """Return answers of one token, how many steps each worker has split, and what is in each worker's caches."""
    engine.llm.collective_rpc(_clear_caches)
    if split:
        cut_at_boundaries(engine, rank)
        answers, counts = generate(engine, rank, [prompts], 1, ARRIVE)
    else:
        answers, counts = answer(engine, rank, [prompts], 1, None, ARRIVE)
    return answers, [count["split"] for count in counts], engine.llm.collective_rpc(_sum_caches)


def _list_caches(worker: Any) -> dict[str, Sequence[torch.Tensor]]:
    layers = worker.model_runner.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", ()) for name, layer in layers.items()}
    return {name: [cache] if isinstance(cache, torch.Tensor) else cache for name, cache in caches.items() if len(cache)}


def _clear_caches(worker: Any) -> None:
    for caches in _list_caches(worker).values():
        for cache in caches:
            cache.zero_()


def _sum_caches(worker: Any) -> Sums:
    return {
        name: sorted(torch.cat([cache.cpu().double().flatten(0, 1).flatten(1) for cache in caches], 1).sum(1).tolist())
        for name, caches in _list_caches(worker).items()
    }


def assert_prefills_are_equal(npus: Ranks, drafting: str) -> None:
    """Compare answers and caches of split steps with those of unsplit ones, the layer that drafts included."""
    ((unsplit, none, kept),) = npus.run(answer_and_read, False, PROMPTS)
    ((split, steps, split_kept),) = npus.run(answer_and_read, True, PROMPTS)
    assert not any(none)
    assert min(steps) >= 3, steps
    assert find_difference(unsplit, split) == 0.0
    drafts = [any(drafting in name for name in caches) for caches in kept]
    assert drafts == [False] * (len(kept) // 2) + [True] * (len(kept) // 2)
    for before, after in zip(kept, split_kept, strict=True):
        assert all(any(sums) for sums in before.values()), "a cache that holds nothing"
        assert before == after


@pytest.mark.slow
def test_the_last_stage_drafts() -> None:
    for npus in start(1, TINY, RECORDED, **PIPELINE, **leave_backend(draft_by_mtp(2)), **PRODUCER):
        assert_prefills_are_equal(npus, "layers.3")


@pytest.mark.slow
def test_the_last_stage_drafts_with_context_parallel_attention(tmp_path: Path) -> None:
    """In int8, caches as well, as the tutorials have GLM-5: but for the keys that its stages pass on."""
    options = {**SHARED_OUT, **PIPELINE, **QUANTIZED, **BOTH, **DRAFTS, **PRODUCER}
    for npus in start(1, make_model(tmp_path, drafts=True), {**FOUR, **RECORDED}, **options):
        assert_prefills_are_equal(npus, "layers.3")
