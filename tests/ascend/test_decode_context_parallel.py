"""Decode context parallel sparse attention inside vllm-ascend: split steps give what its own steps give, to the bit.

Ranks have blocks of 128 tokens of a request in turn. In steps that prefill they gather the blocks that are referred to;
in steps of decodes each attends to its own keys, with the heads of all ranks (or with the tokens of all, where those
are shared out as well), and results are merged. Each test takes one to two minutes on two busy cores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ascend.context_parallel import (
    answer_without,
    derive_states,
    find_attentions,
    list_unsupported,
    share_builders,
)
from tests.support.ascend.drafts import assert_drafts_are_equal
from tests.support.ascend.engines import FOUR, OPTIONS, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_prefills_are_equal,
)
from tests.support.ascend.jobs import answer, cut_at_boundaries, find_decider, generate, make_prompts
from tests.support.ascend.modelslim import DYNAMIC, STATIC, quantize_model
from tests.support.ascend.mtp_layers import DRAFTS, add_mtp_layer
from tests.support.ascend.options import A3, FUSED, GRAPHS
from tests.support.ascend.quantized_caches import BOTH, PRODUCER, find_types, make_model
from tests.support.ascend.reference import count_equal
from tests.support.ascend.sparse_attention import (
    GLM,
    QUANTIZED,
    SHARING,
    V32,
    assert_data_parallel_steps_are_equal,
    share_rows,
)
from tests.support.ascend.traps import keep_rotary_tables
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.families import make_family
from tests.support.vllm.ranks import Ranks

pytestmark = pytest.mark.slow
SHARED_OUT: dict[str, Any] = {
    "decode_context_parallel_size": 2,
    "cp_kv_cache_interleave_size": OPTIONS["block_size"],
}
ALONE: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **SHARED_OUT}
WITH_TOKENS = {**ALONE, "additional_config": {**OPTIONS["additional_config"], "enable_dsa_cp": True}}
FLASHCOMM = {**ALONE, "additional_config": {**OPTIONS["additional_config"], "enable_flashcomm1": True}}
LAYOUTS = pytest.mark.parametrize("options", [ALONE, WITH_TOKENS], ids=["keys", "keys and tokens"])
DECODES = [make_prompts(40, 200, 20, 140, 5, 60)]


def assert_steps_are_equal(npus: Ranks) -> None:
    """Compare prefills, requests cut inside, decodes alone, and decodes mixed with prefills."""
    assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
    for size in (128, 201):  # at the edge of a block, and within one
        assert_chunks_are_equal(npus, 400, size)
    assert_mixed_steps_are_equal(npus)


def assert_mixed_steps_are_equal(npus: Ranks) -> None:
    """Compare steps of decodes, chunks and prefills, each cut at a boundary of requests, with unsplit ones."""
    prompts, arrive = [make_prompts(30, 7, 500, 90, 11, 200)], (0, 0, 1, 2, 3, 5)
    unsplit, again = (npus.run(answer, prompts, 8, None, arrive)[0][0] for _ in range(2))
    assert find_difference(unsplit, again) == 0.0, "unsplit steps differ from run to run"
    npus.run(cut_at_boundaries)
    ((split, counts),) = npus.run(generate, prompts, 8, arrive)
    assert all(count["split"] >= 10 and set(count["declined"]) <= {"nowhere to cut"} for count in counts), counts
    assert find_difference(unsplit, split) == 0.0


@LAYOUTS
@pytest.mark.parametrize("name", [V32, GLM])
def test_split_steps_are_equal_to_unsplit_ones(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    for npus in start(1, make_family(name, tmp_path, **(SHARING if name == GLM else {})), **options):
        assert npus.run(find_attentions) == [{"AscendSFADCPImpl" if options is ALONE else "AscendSFADSADCPImpl"}]
        assert npus.run(list_unsupported, 1) == [[]]
        (unsupported,) = npus.run(list_unsupported, 2)
        assert "not supported yet: decode context parallel in a pipeline" in unsupported
        assert_steps_are_equal(npus)


@LAYOUTS
def test_ranks_that_share_out_keys_answer_as_those_that_do_not(options: dict[str, Any], tmp_path: Path) -> None:
    """Unsplit: what a prefill gathers is the same to the bit, and what decodes merge is rounded otherwise."""
    model = make_family(GLM, tmp_path, **SHARING)
    without = {name: value for name, value in options.items() if name not in SHARED_OUT}
    found = [npus.run(answer, DECODES, 4)[0][0] for each in (options, without) for npus in start(1, model, **each)]
    first = [[Answer(each.tokens[:1], each.log_probs[:1]) for each in answers] for answers in found]
    assert find_difference(*first) == 0.0
    assert 0.0 < find_difference(*found) < 0.1
    assert count_equal(*found) == len(DECODES[0])


@pytest.mark.parametrize(
    ("name", "attention", "options"),
    [(V32, STATIC, ALONE), (V32, STATIC, WITH_TOKENS), (GLM, DYNAMIC, ALONE), (GLM, DYNAMIC, WITH_TOKENS)],
    ids=["V3.2", "V3.2, and tokens", "GLM-5.2", "GLM-5.2, and tokens"],
)
def test_quantized_weights(name: str, attention: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = make_family(name, tmp_path / "source", **(SHARING if name == GLM else {}))
    for npus in start(1, quantize_model(source, tmp_path / "model", attention, DYNAMIC), **options, **QUANTIZED):
        assert_steps_are_equal(npus)


@pytest.mark.parametrize("options", [ALONE, WITH_TOKENS, FLASHCOMM], ids=["keys", "keys and tokens", "FlashComm"])
def test_caches_in_int8_whose_keys_are_shared_out(options: dict[str, Any], tmp_path: Path) -> None:
    for npus in start(1, make_model(tmp_path, **SHARING), **options, **QUANTIZED, **BOTH):
        assert npus.run(find_types) == [[({"int8"}, {"int8"})] * 2]
        assert_steps_are_equal(npus)


@pytest.mark.parametrize("options", [ALONE, WITH_TOKENS, FLASHCOMM], ids=["keys", "keys and tokens", "FlashComm"])
def test_drafts_are_verified_with_the_keys_of_all_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    model = add_mtp_layer(make_family(GLM, tmp_path, **SHARING))
    for npus in start(1, model, **options, **DRAFTS):
        assert_drafts_are_equal(npus)


@pytest.mark.parametrize("options", [WITH_TOKENS, FLASHCOMM], ids=["keys and tokens", "FlashComm"])
def test_prefill_nodes_that_share_out_keys(options: dict[str, Any], tmp_path: Path) -> None:
    """On A3: experts by fused MC2, everything in int8, an indexer's keys stored run by run, and drafts."""
    additional = {"additional_config": {**options["additional_config"], "enable_flashcomm1": True, **FUSED}}
    environment = {**A3, "DBO_KV_CONNECTORS": "HookRecorder"}
    settings = {**options, **additional, **QUANTIZED, **BOTH, **PRODUCER, **DRAFTS}
    for npus in start(1, make_model(tmp_path, drafts=True, **SHARING), environment, **settings):
        assert_drafts_are_equal(npus)
        assert_steps_are_equal(npus)


@LAYOUTS
def test_data_parallel_ranks_that_share_out_keys_are_equal(options: dict[str, Any], tmp_path: Path) -> None:
    prompts, arrive = [make_prompts(30, 7, 200, 90), make_prompts(140, 11)], [(0, 0, 1, 3), (0, 3)]
    for npus in start(2, make_family(GLM, tmp_path, **SHARING), FOUR, **options):
        assert_data_parallel_prefills_are_close(npus, 0.0)
        assert_data_parallel_steps_are_equal(npus, prompts, arrive)


@LAYOUTS
def test_decodes_that_merge_results_are_replayed_and_prefills_split(options: dict[str, Any], tmp_path: Path) -> None:
    additional = {**GRAPHS["additional_config"], **options.get("additional_config", {})}
    settings = {**options, **GRAPHS, "additional_config": additional}
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), **settings):
        ((unsplit, _),) = npus.run(answer, [make_prompts(60, 200, 25)], 6)
        ((split, counts),) = npus.run(answer, [make_prompts(60, 200, 25)], 6, [60])
        assert [count["split"] for count in counts] == [1] * 2, "a prefill; five decodes are replayed"
        assert find_difference(unsplit, split) == 0.0


def forget_exchange() -> AbstractContextManager[Any]:
    """Let ranks gather queries in a micro-batch of decodes, whatever else is in its step."""
    from dbo_runtime.vllm_plugin.platforms.npu import NpuPlatform

    return patch.object(NpuPlatform, "get_build_arguments", lambda self, metadata: {})


def keep_lengths_of_keys() -> AbstractContextManager[Any]:
    """Give each slice the rank's numbers of keys of all requests."""
    from dbo_runtime.vllm_plugin.context import splitter

    slice_common = splitter.slice_common

    def keep(common: Any, slices: Any, sliced: Any) -> list[Any]:
        lengths = {"dcp_local_seq_lens": common.dcp_local_seq_lens}
        return [replace(part, **lengths) for part in slice_common(common, slices, sliced)]

    return patch.object(splitter, "slice_common", keep)


@pytest.mark.parametrize(
    ("options", "further"), [(ALONE, ()), (WITH_TOKENS, (derive_states,))], ids=["keys", "keys and tokens"]
)
def test_without_a_remedy_answers_are_wrong(
    options: dict[str, Any], further: tuple[Callable[[], AbstractContextManager[Any]], ...], tmp_path: Path
) -> None:
    """Cut between requests, of which some decode while others are prefilled."""
    remedies = keep_rotary_tables, share_rows, share_builders, forget_exchange, keep_lengths_of_keys, *further
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), **options):
        ((unsplit, _),) = npus.run(answer, DECODES, 4, None, (0, 0, 0, 1, 2, 2))
        for remove in (nullcontext, *remedies, nullcontext):
            ((split, steps),) = npus.run(answer_without, remove, DECODES)
            assert steps[0]["split"] >= 4, steps
            assert (find_difference(unsplit, split) > 0.0) == (remove is not nullcontext), remove


def test_requests_that_share_a_prefix_share_blocks_of_all_ranks(tmp_path: Path) -> None:
    """Whether one reads what a later micro-batch writes is found by blocks of as many tokens as vLLM caches by."""
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), **ALONE):
        npus.run(answer, [make_prompts(60, 40)], 1, [60])
        ((cached, *found),) = npus.run(find_block_sizes)
        assert found == [cached] * 2 == [2 * OPTIONS["block_size"]] * 2


def find_block_sizes(engine: Engine, rank: int) -> list[int]:
    """Return the tokens of a block by which the scheduler shares prefixes, and that of each worker's splitter."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    return [scheduler.block_size, *engine.llm.collective_rpc(_find_block_size)]


def _find_block_size(worker: Any) -> int:
    splitter = find_decider(worker).splitter
    builder, _ = next(iter(splitter._builders.values()))
    return int(splitter._read_blocks(SimpleNamespace(layer_names=builder.layer_names))[1])
