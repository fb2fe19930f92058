"""DeepSeek V4 inside vllm-ascend: split steps give what its own steps give, bit for bit.

Of up to 128 keys, each of 4 tokens, its indexer chooses eight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ascend.deepseek_v4 import TEXT_ONLY, make_deepseek_v4
from tests.support.ascend.drafts import answer_with_drafts, assert_drafts_are_equal
from tests.support.ascend.engines import FOUR, OPTIONS, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    PROMPTS,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_nano_batches_are_equal,
    assert_prefills_are_equal,
    assert_ranks_cut_at_their_own_boundaries_are_equal,
)
from tests.support.ascend.jobs import (
    answer,
    answer_in_micro_batches,
    answer_in_nano_batches,
    cut_at_boundaries,
    generate,
    make_prompts,
)
from tests.support.ascend.modelslim import DYNAMIC, INT4, quantize_model
from tests.support.ascend.mtp_layers import MTP
from tests.support.ascend.options import A3, GRAPHS
from tests.support.ascend.sparse_attention import CUTS, QUANTIZED, assert_data_parallel_steps_are_equal, share_out
from tests.support.ascend.traps import PROMPTS as DECODES
from tests.support.ascend.traps import keep_rotary_tables
from tests.support.vllm.engine import Engine, find_difference
from tests.support.vllm.ranks import Ranks

CHUNKS, SHARED, SHARED_OUT = {"enable_flashcomm1": True}, {"enable_shared_expert_dp": True}, {"enable_dsa_cp": True}


def serve_with(**flags: Any) -> dict[str, Any]:
    """Return options of an engine with these flags of vllm-ascend's, and one stream in attention."""
    return {
        "distributed_executor_backend": "mp",  # in one process, vLLM and its worker would share a block size
        "additional_config": {**OPTIONS["additional_config"], "multistream_dsv4_dsa_overlap": False, **flags},
    }


def name_flags(value: Any) -> str:
    """Return a name of a case."""
    return " ".join(name.removeprefix("enable_") for name in value) or "-" if isinstance(value, dict) else str(value)


SERVED = serve_with()
COMPARISON = "dbo_runtime.vllm_plugin.step.comparison"
STREAM_FAILED = "a kernel of the stand-in has failed|synchronize failed"  # whichever the worker comes to first


def assert_steps_are_equal(npus: Ranks) -> None:
    """Compare prefills, requests cut inside, also between keys, and decodes mixed with them."""
    assert_prefills_are_equal(npus, [*CUTS, [BOUNDARIES[1], BOUNDARIES[3]]])
    for length, size in ((400, 128), (400, 83), (130, 77), (20, 3)):
        assert_chunks_are_equal(npus, length, size)
    assert_mixed_steps_are_equal(npus)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_split_steps_are_equal_to_unsplit_ones(workers: int, tmp_path: Path) -> None:
    for npus in start(1, make_deepseek_v4(tmp_path), **share_out(workers), **SERVED):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_of_different_sizes_are_equal(tmp_path: Path) -> None:
    for npus in start(2, make_deepseek_v4(tmp_path), **SERVED):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "flags"), [(1, {}), (1, SHARED), (2, CHUNKS), (2, CHUNKS | SHARED | SHARED_OUT)], ids=name_flags
)
def test_data_parallel_ranks_cut_at_their_own_boundaries_are_equal(
    workers: int, flags: dict[str, bool], tmp_path: Path
) -> None:
    """Also in vllm-ascend 0.23, which does not pad a rank to the longest batch."""
    layout = (FOUR,) if workers > 1 else ()
    for npus in start(2, make_deepseek_v4(tmp_path), *layout, **{**share_out(workers), **serve_with(**flags)}):
        assert_ranks_cut_at_their_own_boundaries_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [CHUNKS, CHUNKS | SHARED, CHUNKS | SHARED | SHARED_OUT], ids=name_flags)
def test_data_parallel_ranks_of_chunks_are_equal(flags: dict[str, bool], tmp_path: Path) -> None:
    options = {**share_out(2), **serve_with(**flags)}
    for npus in start(2, make_deepseek_v4(tmp_path), FOUR, **options):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
def test_data_parallel_ranks_verify_drafts_alike(tmp_path: Path) -> None:
    prompts, arrive = [make_prompts(30, 7, 200, 90), make_prompts(40, 11)], [(0, 0, 1, 3), (0, 3)]
    for npus in start(2, make_deepseek_v4(tmp_path, drafts=True), **SERVED, **MTP):
        assert_data_parallel_steps_are_equal(npus, prompts, arrive)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "is_quantized"), [({"enable_fused_mc2": 1}, True), ({"enable_prefill_mc2": True}, False)]
)
def test_experts_of_chunks_that_kernels_dispatch(flags: dict[str, Any], is_quantized: bool, tmp_path: Path) -> None:
    """MC2 on A3, with tensor parallel: its router is given the token ids of a chunk."""
    model, options = make_deepseek_v4(tmp_path / "source"), {}
    if is_quantized:
        model, options = quantize_model(model, tmp_path / "model", DYNAMIC, DYNAMIC), QUANTIZED
    for npus in start(1, model, A3, **share_out(2), **serve_with(**flags), **options):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_with_graphs_of_decodes_prefills_are_split(tmp_path: Path) -> None:
    options = {**GRAPHS, **serve_with(**GRAPHS["additional_config"])}
    for npus in start(1, make_deepseek_v4(tmp_path), **options):
        ((unsplit, _),) = npus.run(answer, [make_prompts(60, 40, 25)], 6)
        ((split, counts),) = npus.run(answer, [make_prompts(60, 40, 25)], 6, [60])
        assert counts == [{"split": 1, "declined": {}}], "a prefill; five decodes are replayed"
        assert find_difference(unsplit, split) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [CHUNKS, CHUNKS | SHARED], ids=name_flags)
def test_layers_that_pass_on_chunks_of_tokens(flags: dict[str, bool], tmp_path: Path) -> None:
    for npus in start(1, make_deepseek_v4(tmp_path), **share_out(2), **serve_with(**flags)):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "flags"), [(1, {}), (2, {}), (2, CHUNKS), (2, CHUNKS | SHARED_OUT)], ids=name_flags
)
def test_drafts_of_an_mtp_layer_are_accepted_alike(workers: int, flags: dict[str, bool], tmp_path: Path) -> None:
    """It reads the streams of all tokens before the model's head, which the model leaves in a buffer."""
    model = make_deepseek_v4(tmp_path, drafts=True)
    alone = {"DBO_CHECK": "0"}  # a step that ran again, unsplit, would fill the buffer itself
    for npus in start(1, model, alone, **share_out(workers), **serve_with(**flags), **MTP):
        drafts = assert_drafts_are_equal(npus, accepts=False)
        assert drafts["accepted"] > 0
        npus.run(change_workers, _leave_nothing)
        ((_, wrong_drafts, _),) = npus.run(answer_with_drafts, True)
        assert wrong_drafts != drafts


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, CHUNKS, CHUNKS | SHARED_OUT], ids=name_flags)
def test_hidden_states_between_layers_are_those_of_unsplit_steps(flags: dict[str, bool], tmp_path: Path) -> None:
    """A drafter by dspark reads them. It needs Triton itself, so here the model is only set up as if there were one."""
    auto = {"DBO_SPLIT": "auto"}
    for npus in start(1, make_deepseek_v4(tmp_path), auto, **share_out(2), **serve_with(**flags)):
        npus.run(change_workers, _read_between_layers)
        ((_, counts),) = npus.run(answer_in_micro_batches, [PROMPTS], 2, "1")
        assert min(count["split"] for count in counts) >= 1, counts
        if not flags.get("enable_dsa_cp"):  # whose attention takes a chunk of the step's tokens
            ((_, steps),) = npus.run(answer_in_nano_batches, [PROMPTS], 2, 2, "1")
            assert min(steps) >= 1, steps


def _read_between_layers(worker: Any) -> None:
    """Set up the model again as if a drafter read hidden states after its first layers; compare them to the bit."""
    from dbo_runtime.vllm_plugin.install import model_setup, served_model
    from dbo_runtime.vllm_plugin.install.config_checks import choose_adapter

    runner, compared = worker.model_runner, patch(f"{COMPARISON}.describe_difference", _tell_whether_equal)
    compared.start()
    model = runner.get_model()
    config = served_model.get_served_model(model).rank.config
    del model.forward, model._dbo_served_model
    runner.use_aux_hidden_state_outputs = True
    model.set_aux_hidden_state_layers((1, 3))
    drafter = SimpleNamespace(method="dspark", parallel_drafting=True, num_speculative_tokens=3)
    with patch.object(runner.vllm_config, "speculative_config", drafter):
        model_setup.set_up_model(runner, config, choose_adapter(runner.vllm_config))
    served_model.get_served_model(model).start_serving()


def _tell_whether_equal(split: Any, again: Any, *rest: Any, **options: Any) -> str:
    assert len(split) == 3, "the model's result, and two between layers"
    names = [name for name, expected in again.items() if not expected.equal(split[name])]
    return f"other {', '.join(names)}" if names else ""


@pytest.mark.slow
def test_with_a_second_stream_in_attention_steps_are_equal_where_keys_are_kept(tmp_path: Path) -> None:
    """By default, attention has one; vllm-ascend frees keys of the indexer while that stream still reads them."""
    for npus in start(1, make_deepseek_v4(tmp_path), **serve_with(multistream_dsv4_dsa_overlap=True)):
        npus.run(change_workers, _keep_keys)
        assert_steps_are_equal(npus)


def _keep_keys(worker: Any) -> None:
    from vllm_ascend.models.deepseek_v4.indexer import AscendIndexerOps

    quantize, kept = AscendIndexerOps.quantize_key_and_update_cache, deque(maxlen=64)  # keys of many layers

    def quantize_and_keep(self: Any, key: Any, *arguments: Any) -> Any:
        kept.append(key)
        return quantize(self, key, *arguments)

    AscendIndexerOps.quantize_key_and_update_cache = quantize_and_keep


@pytest.mark.slow
def test_where_micro_batches_share_rotary_tables_answers_are_wrong(tmp_path: Path) -> None:
    for npus in start(1, make_deepseek_v4(tmp_path), **SERVED):
        ((unsplit, _),) = npus.run(answer, DECODES, 4)
        npus.run(change_workers, _keep_rotary_tables)
        npus.run(cut_at_boundaries)
        ((split, counts),) = npus.run(generate, DECODES, 4)
        assert counts[0]["split"] >= 4, counts
        assert find_difference(unsplit, split) > 0.0


def _keep_rotary_tables(worker: Any) -> None:
    keep_rotary_tables().__enter__()


def _share_metadata(worker: Any) -> None:
    patch("dbo_runtime.vllm_plugin.context.states.SHARED", "").__enter__()


def _wait_as_the_step(worker: Any) -> None:
    patch("dbo_runtime.vllm_plugin.platforms.npu_metadata._drop_metadata_of_step", print).__enter__()


REMEDIES = [(_share_metadata, STREAM_FAILED), (_wait_as_the_step, "DeviceMetadataStage")]


@pytest.mark.slow
@pytest.mark.parametrize(("remove", "why"), REMEDIES)
def test_micro_batches_cannot_take_metadata_of_the_step(
    remove: Callable[[Any], None], why: str, tmp_path: Path
) -> None:
    """Neither what builders have left for each other, nor what a stream of its own writes."""
    for npus in start(1, make_deepseek_v4(tmp_path), **SERVED):
        npus.run(change_workers, remove)
        npus.run(cut_at_boundaries)
        with pytest.raises(AssertionError, match=why):
            npus.run(generate, DECODES, 4)


def change_workers(engine: Engine, rank: int, change: Callable[[Any], None]) -> None:
    """Change something in each worker, for as long as it lives."""
    engine.llm.collective_rpc(change)


def _leave_nothing(worker: Any) -> None:
    worker.model_runner.get_model().forward.runner._ends._keep_output = None


@pytest.mark.slow
@pytest.mark.parametrize("experts", [DYNAMIC, INT4])
def test_quantized_weights(experts: str, tmp_path: Path) -> None:
    source = make_deepseek_v4(tmp_path / "source")
    model = quantize_model(source, tmp_path / "model", DYNAMIC, experts)
    for npus in start(1, model, **share_out(2), **SERVED, **QUANTIZED):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_attention_from_chunks_of_tokens(quantized: bool, tmp_path: Path) -> None:
    """Context parallel sparse attention (DSA-CP), which exchanges chunks of tokens for heads."""
    model, options = make_deepseek_v4(tmp_path / "source"), {}
    if quantized:
        model, options = quantize_model(model, tmp_path / "model", DYNAMIC, DYNAMIC), QUANTIZED
    for npus in start(1, model, **share_out(2), **serve_with(**CHUNKS, **SHARED_OUT), **options):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, CHUNKS], ids=name_flags)
def test_a_model_that_sees_images_has_nano_batches(flags: dict[str, bool], tmp_path: Path) -> None:
    """All its layers choose experts by token id. Its encoder, and so images, are left out."""
    model, auto = make_deepseek_v4(tmp_path, sees_images=True), {"DBO_SPLIT": "auto"}
    for npus in start(1, model, auto, **share_out(2), **serve_with(**flags), **TEXT_ONLY):
        assert_nano_batches_are_equal(npus)
