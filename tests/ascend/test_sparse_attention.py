"""Sparse attention (DeepSeek V3.2, GLM-5) inside vllm-ascend: split steps give what its own steps give, bit for bit.

Prompts are shorter than the 2048 keys that vllm-ascend lets an indexer choose, so that all are chosen, but in one test.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.support.ascend.drafts import assert_drafts_are_equal
from tests.support.ascend.engines import PIPELINE, start
from tests.support.ascend.equivalence import (
    PROMPTS,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.support.ascend.jobs import (
    answer,
    answer_in_chunks,
    answer_in_micro_batches,
    answer_in_nano_batches,
    find_decider,
    make_prompts,
)
from tests.support.ascend.modelslim import DYNAMIC, INT4, STATIC, quantize_model
from tests.support.ascend.mtp_layers import DRAFTS, add_mtp_layer
from tests.support.ascend.options import GRAPHS
from tests.support.ascend.sparse_attention import (
    CUTS,
    GLM,
    QUANTIZED,
    REUSING,
    SHARING,
    V32,
    answer_without,
    assert_data_parallel_steps_are_equal,
    assert_steps_are_equal,
    share_out,
    share_rows,
)
from tests.support.ascend.traps import keep_rotary_tables
from tests.support.vllm.engine import Engine, find_difference
from tests.support.vllm.families import INDEXED, make_family

TABLES = int(find_release() == LATEST_ASCEND)  # builders of 0.23 keep none
LONG = {
    "max_position_embeddings": 4096,
    "rope_scaling": {**INDEXED["rope_scaling"], "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize(
    ("name", "workers"), [(V32, 1), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in (V32, GLM))]
)
def test_split_steps_are_equal_to_unsplit_ones(name: str, workers: int, tmp_path: Path) -> None:
    for npus in start(1, make_family(name, tmp_path), **share_out(workers)):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SHARING, {}], ids=["without indexers of their own", "with"])
def test_layers_that_share_chosen_keys_take_those_of_their_micro_batch(sizes: dict[str, Any], tmp_path: Path) -> None:
    model = make_family(GLM, tmp_path, **sizes)
    for npus in start(1, model, **share_out(2), **({} if sizes else REUSING)):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "experts"), [(V32, STATIC, DYNAMIC), (V32, DYNAMIC, DYNAMIC), (GLM, DYNAMIC, INT4)]
)
def test_quantized_weights(name: str, attention: str, experts: str, tmp_path: Path) -> None:
    """Where attention is quantized by token, one operator prepares it, and gives the indexer what it has quantized."""
    sizes = SHARING if name == GLM else {}
    model = quantize_model(make_family(name, tmp_path / "source", **sizes), tmp_path / "model", attention, experts)
    for npus in start(1, model, **share_out(2), **QUANTIZED):
        by_operator = attention == DYNAMIC and find_release() == LATEST_ASCEND  # in 0.23 on nodes that decode only
        assert npus.run(find_preparation) == [[{"PROLOG_V3" if by_operator else "NATIVE"}] * 2]
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_attention_that_one_operator_prepares_from_static_bytes(tmp_path: Path) -> None:
    """By default, vllm-ascend does so for up to 1024 tokens (MLAPO)."""
    model = quantize_model(make_family(V32, tmp_path / "source"), tmp_path / "model")
    for npus in start(1, model, **share_out(2), **QUANTIZED, additional_config={"enable_mlapo": True}):
        assert_steps_are_equal(npus)
        assert npus.run(find_preparation) == [[{"MLAPO"}] * 2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantized"), [(V32, False), (V32, True), (GLM, False), (GLM, True)])
def test_data_parallel_ranks_of_different_sizes_are_equal(name: str, quantized: bool, tmp_path: Path) -> None:
    """Prefills, and decodes mixed with them; one rank runs dummy batches with the other in the end."""
    model, options = make_family(name, tmp_path / "source", **(SHARING if name == GLM else {})), {}
    if quantized:
        experts = INT4 if name == GLM else DYNAMIC
        model, options = quantize_model(model, tmp_path / "model", DYNAMIC, experts), QUANTIZED
    prompts, arrive = [make_prompts(30, 7, 200, 90), make_prompts(40, 11)], [(0, 0, 1, 3), (0, 3)]
    for npus in start(2, model, **options):
        assert_data_parallel_prefills_are_close(npus, 0.0)
        assert_data_parallel_steps_are_equal(npus, prompts, arrive)


@pytest.mark.slow
@pytest.mark.parametrize("name", [V32, GLM])
def test_data_parallel_ranks_verify_drafts_alike(name: str, tmp_path: Path) -> None:
    model = add_mtp_layer(make_family(name, tmp_path, **(SHARING if name == GLM else {})))
    prompts, arrive = [make_prompts(30, 7, 200, 90), make_prompts(40, 11)], [(0, 0, 1, 3), (0, 3)]
    for npus in start(2, model, **DRAFTS):
        assert_data_parallel_steps_are_equal(npus, prompts, arrive)


@pytest.mark.slow
def test_stages_of_a_pipeline_are_equal(tmp_path: Path) -> None:
    for npus in start(1, make_family(GLM, tmp_path), **PIPELINE):
        assert_prefills_are_equal(npus, CUTS)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
def test_stages_that_share_chosen_keys_have_nano_batches(tmp_path: Path) -> None:
    """The second stage begins with the keys that the first has chosen, also where a step runs a second time."""
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), {"DBO_SPLIT": "auto"}, **PIPELINE):
        ((unsplit, _),) = npus.run(answer, [PROMPTS], 4)
        for check in ("0", "1"):
            ((nano, steps),) = npus.run(answer_in_nano_batches, [PROMPTS], 4, 2, check)
            assert min(steps) == 4, steps
            assert find_difference(unsplit, nano) == 0.0
        ((_, counts),) = npus.run(answer_in_micro_batches, [PROMPTS], 1)
        reason = "stages of a pipeline pass on which keys sparse attention has chosen"
        assert counts == [{"split": 0, "declined": {reason: 1}}] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [(V32, 1), (V32, 2), (GLM, 2)])
def test_drafts_of_an_mtp_layer_are_accepted_alike(name: str, workers: int, tmp_path: Path) -> None:
    model = add_mtp_layer(make_family(name, tmp_path, **(SHARING if name == GLM else {})))
    for npus in start(1, model, **share_out(workers), **DRAFTS):
        assert_drafts_are_equal(npus)
        assert npus.run(count_tables) == [[TABLES] * workers]


def find_preparation(engine: Engine, rank: int) -> list[set[str]]:
    """Return how attention is prepared on each worker."""
    found: list[set[str]] = engine.llm.collective_rpc(_find_preparation)
    return found


def _find_preparation(worker: Any) -> set[str]:
    modules = worker.model_runner.get_model().modules()
    attentions = [impl for impl in (getattr(module, "impl", None) for module in modules) if hasattr(impl, "W_UK_T")]
    return {_name_preparation(attention) for attention in attentions}


def _name_preparation(attention: Any) -> str:
    if hasattr(attention, "preprocess_type"):
        return str(attention.preprocess_type.name)
    return "PROLOG_V3" if attention.enable_sfa_prolog_v3 else "MLAPO" if attention.enable_mlapo else "NATIVE"


def count_tables(engine: Engine, rank: int) -> list[int]:
    """Return the most tables that a builder of metadata for micro-batches keeps, on each worker."""
    found: list[int] = engine.llm.collective_rpc(_count_tables)
    return found


def _count_tables(worker: Any) -> int:
    splitter = find_decider(worker).splitter
    builders = [builder for _, own in splitter._builders.values() for builder in own]
    return max(len(getattr(builder, "_rope_buffers", ())) for builder in builders)


@pytest.mark.slow
@pytest.mark.parametrize("name", [V32, GLM])
def test_with_graphs_of_decodes_prefills_are_split(name: str, tmp_path: Path) -> None:
    for npus in start(1, make_family(name, tmp_path, **(SHARING if name == GLM else {})), **GRAPHS):
        ((unsplit, _),) = npus.run(answer, [make_prompts(60, 40, 25)], 6)
        ((split, counts),) = npus.run(answer, [make_prompts(60, 40, 25)], 6, [60])
        assert counts == [{"split": 1, "declined": {}}], "a prefill; five decodes are replayed"
        assert find_difference(unsplit, split) == 0.0


@pytest.mark.slow
def test_of_a_long_prompt_the_best_keys_are_chosen(tmp_path: Path) -> None:
    """Cut inside, as in two steps; and what it answers depends on the indexer."""
    lengths = {"max_model_len": 2560, "max_num_batched_tokens": 2560}
    found = []
    for seed in (0, 1):
        model = make_family(GLM, tmp_path / str(seed), **SHARING, **LONG)
        if seed:
            shuffle_indexer(model)
        for npus in start(1, model, **lengths):
            (chunked,) = npus.run(answer_in_chunks, [make_prompts(2400)], 1300)
            ((split, counts),) = npus.run(answer, [make_prompts(2400)], 1, [1300])
            assert counts[0]["split"] == 1, counts
            assert find_difference(chunked, split) == 0.0
            found.append(split)
    assert find_difference(*found) > 0.0


def shuffle_indexer(model: Path) -> None:
    """Let the indexer of the first layer weigh its heads the other way round."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.self_attn.indexer.weights_proj.weight"].neg_()
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("remove", [keep_rotary_tables, share_rows])
def test_without_a_remedy_answers_are_wrong(remove: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    for npus in start(1, make_family(GLM, tmp_path, **SHARING)):
        ((unsplit, _),) = npus.run(answer, [make_prompts(40, 30, 20, 10, 5, 50)], 4)
        ((split, steps),) = npus.run(answer_without, remove, [make_prompts(40, 30, 20, 10, 5, 50)])
        assert steps[0]["split"] >= 4, steps
        assert find_difference(unsplit, split) > 0.0
