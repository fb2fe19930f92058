"""DeepSeek V4.1 inside vllm-ascend: steps in nano-batches give what its own steps give, bit for bit.

Of up to 512 keys, its indexer chooses eight; from its fifth layer on, they are in four of up to 64 blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.deepseek_v41 import SERVED, make_deepseek_v41, quantize_deepseek_v41
from tests.support.ascend.engines import FOUR, OPTIONS, start
from tests.support.ascend.equivalence import (
    assert_data_parallel_nano_batches_are_equal,
    assert_mixed_nano_batches_are_equal,
    assert_nano_batches_are_equal,
)
from tests.support.ascend.jobs import answer, answer_in_nano_batches, make_prompts
from tests.support.ascend.options import A3, GRAPHS
from tests.support.ascend.sparse_attention import QUANTIZED, share_out
from tests.support.vllm.engine import Engine, find_difference

AUTO = {"DBO_SPLIT": "auto"}
CHUNKS, SHARED, SHARED_OUT = {"enable_flashcomm1": True}, {"enable_shared_expert_dp": True}, {"enable_dsa_cp": True}


def serve_with(**flags: Any) -> dict[str, Any]:
    """Return options of an engine with these flags of vllm-ascend's."""
    return {**SERVED, "additional_config": {**OPTIONS["additional_config"], **flags}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "flags"),
    [(1, {}), (2, {}), (2, CHUNKS), (2, CHUNKS | SHARED), (2, CHUNKS | SHARED | SHARED_OUT)],
    ids=["1", "2", "2-flashcomm1", "2-shared_expert_dp", "2-dsa_cp"],
)
def test_nano_batches_are_equal_to_unsplit_steps(workers: int, flags: dict[str, bool], tmp_path: Path) -> None:
    for npus in start(1, make_deepseek_v41(tmp_path), AUTO, **share_out(workers), **serve_with(**flags)):
        assert_nano_batches_are_equal(npus)
        assert_mixed_nano_batches_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "flags"), [(1, {}), (2, CHUNKS | SHARED | SHARED_OUT)], ids=["1", "2-flashcomm1-dsa_cp"]
)
def test_data_parallel_ranks_are_equal(workers: int, flags: dict[str, bool], tmp_path: Path) -> None:
    options = {**share_out(workers), **serve_with(**flags), "enable_expert_parallel": True}
    for npus in start(2, make_deepseek_v41(tmp_path), {**AUTO, **FOUR}, **options):
        assert_data_parallel_nano_batches_are_equal(npus)


@pytest.mark.slow
def test_without_rows_of_the_engrams_answers_are_others(tmp_path: Path) -> None:
    """So rows that were cut wrongly would be seen."""
    prompts = [make_prompts(60, 40, 25)]
    for npus in start(1, make_deepseek_v41(tmp_path), AUTO, **serve_with()):
        ((unsplit, _),) = npus.run(answer, prompts, 4)
        npus.run(leave_out_rows)
        ((without, _),) = npus.run(answer, prompts, 4)
        ((nano, steps),) = npus.run(answer_in_nano_batches, prompts, 4, 2)
        assert min(steps) == 4, steps
        assert find_difference(without, nano) == 0.0
        assert find_difference(unsplit, without) > 0.0


def leave_out_rows(engine: Engine, rank: int) -> None:
    """Let layers add no rows, from now on."""
    engine.llm.collective_rpc(_leave_out_rows)


def _leave_out_rows(worker: Any) -> None:
    from vllm_ascend.models.deepseek_v41.engram.layer import AscendEngram

    AscendEngram.forward = _keep_streams


def _keep_streams(engram: Any, streams: Any, *rest: Any) -> Any:
    return streams


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"enable_fused_mc2": 1}], ids=["-", "fused_mc2"])
def test_quantized_weights(flags: dict[str, Any], tmp_path: Path) -> None:
    """With one kernel from dispatch to combine, on A3, too."""
    model = quantize_deepseek_v41(tmp_path / "source", tmp_path / "model")
    options = {**share_out(2), **serve_with(**CHUNKS, **SHARED, **SHARED_OUT, **flags), **QUANTIZED}
    for npus in start(1, model, {**AUTO, **(A3 if flags else {})}, **options):
        assert_nano_batches_are_equal(npus)
        assert_mixed_nano_batches_are_equal(npus)


@pytest.mark.slow
def test_with_graphs_of_decodes_prefills_are_split(tmp_path: Path) -> None:
    """Hashes are made before a graph is replayed, and rows are looked up in memory of the host."""
    options = {**GRAPHS, **serve_with(**GRAPHS["additional_config"]), "engram_config": {"cpu_offload": True}}
    for npus in start(1, make_deepseek_v41(tmp_path), AUTO, **options):
        prompts = [make_prompts(60, 40, 25)]
        ((unsplit, _),) = npus.run(answer, prompts, 6)
        ((nano, steps),) = npus.run(answer_in_nano_batches, prompts, 6, 2)
        assert steps == [1], "a prefill; five decodes are replayed"
        assert find_difference(unsplit, nano) == 0.0
