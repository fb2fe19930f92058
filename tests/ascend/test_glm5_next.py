"""GLM-5.3-Flash inside vllm-ascend: steps in nano-batches give what its own steps give, bit for bit.

Of up to 128 pools, each of 4 keys, its indexer chooses eight.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.drafts import ARRIVE, PROMPTS, TOKENS
from tests.support.ascend.engines import FOUR, start
from tests.support.ascend.equivalence import (
    assert_data_parallel_nano_batches_are_equal,
    assert_mixed_nano_batches_are_equal,
    assert_nano_batches_are_equal,
)
from tests.support.ascend.glm5_next import TEXT_ONLY, make_glm5_next
from tests.support.ascend.jobs import answer, answer_in_nano_batches, make_prompts
from tests.support.ascend.modelslim import DYNAMIC, quantize_model
from tests.support.ascend.mtp_layers import DRAFTS
from tests.support.ascend.options import FLASHCOMM, GRAPHS
from tests.support.ascend.sparse_attention import QUANTIZED, share_out
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.speculation import count_drafts

AUTO = {"DBO_SPLIT": "auto"}


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "options"), [(1, {}), (2, {}), (2, FLASHCOMM)], ids=["1", "2", "2-flashcomm1"])
def test_nano_batches_are_equal_to_unsplit_steps(workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    for npus in start(1, make_glm5_next(tmp_path), AUTO, **share_out(workers), **TEXT_ONLY, **options):
        assert_nano_batches_are_equal(npus)
        assert_mixed_nano_batches_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "options"), [(1, {}), (2, FLASHCOMM)], ids=["1", "2-flashcomm1"])
def test_data_parallel_ranks_are_equal(workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {**AUTO, **FOUR}
    for npus in start(2, make_glm5_next(tmp_path), settings, **TEXT_ONLY, tensor_parallel_size=workers, **options):
        assert_data_parallel_nano_batches_are_equal(npus)


@pytest.mark.slow
def test_quantized_weights(tmp_path: Path) -> None:
    model = quantize_model(make_glm5_next(tmp_path / "source"), tmp_path / "model", DYNAMIC, DYNAMIC)
    for npus in start(1, model, AUTO, **share_out(2), **TEXT_ONLY, **QUANTIZED):
        assert_nano_batches_are_equal(npus)
        assert_mixed_nano_batches_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_drafts_are_verified_alike(workers: int, tmp_path: Path) -> None:
    model = make_glm5_next(tmp_path, drafts=True)
    for npus in start(1, model, AUTO, **share_out(workers), **TEXT_ONLY, **DRAFTS):
        ((unsplit, _, drafts),) = npus.run(answer_with_drafts, False)
        ((nano, steps, own),) = npus.run(answer_with_drafts, True)
        assert min(steps) >= 10, steps
        assert own == drafts
        assert drafts["drafted"] > drafts["accepted"] > 0
        assert find_difference(unsplit, nano) == 0.0


def answer_with_drafts(engine: Engine, rank: int, split: bool) -> tuple[list[Answer], list[int], Counter[str]]:
    """Return the answers, how many steps each worker ran in nano-batches, and the counts of drafts."""
    with count_drafts(engine) as counts:
        if split:
            return *answer_in_nano_batches(engine, rank, [PROMPTS], TOKENS, 2, "0", ARRIVE), counts
        return *answer(engine, rank, [PROMPTS], TOKENS, None, ARRIVE), counts


@pytest.mark.slow
def test_with_graphs_of_decodes_prefills_are_split(tmp_path: Path) -> None:
    """Where vLLM captures them, builders of linear attention are given further arguments by position."""
    prompts = [make_prompts(60, 40, 25)]
    for npus in start(1, make_glm5_next(tmp_path), AUTO, **{**TEXT_ONLY, **GRAPHS}):
        ((unsplit, _),) = npus.run(answer, prompts, 6)
        ((nano, steps),) = npus.run(answer_in_nano_batches, prompts, 6, 2)
        assert steps == [1], "a prefill; five decodes are replayed"
        assert find_difference(unsplit, nano) == 0.0
