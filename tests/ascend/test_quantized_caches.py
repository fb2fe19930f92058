"""Caches in int8 inside vllm-ascend, of sparse attention and of its indexer: split steps are equal to unsplit ones.

A latent is quantized by itself, and so is an indexer's key: what is in a cache depends on its token only. Weights are
quantized as tutorials combine them with such caches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.context_parallel import SHARED_OUT
from tests.support.ascend.drafts import assert_drafts_are_equal
from tests.support.ascend.engines import start
from tests.support.ascend.equivalence import assert_data_parallel_prefills_are_close
from tests.support.ascend.jobs import make_prompts
from tests.support.ascend.modelslim import DYNAMIC, INT4, STATIC
from tests.support.ascend.mtp_layers import DRAFTS
from tests.support.ascend.quantized_caches import BOTH, INDEXERS, PRODUCER, find_types, make_model
from tests.support.ascend.sparse_attention import (
    GLM,
    QUANTIZED,
    REUSING,
    SHARING,
    V32,
    assert_data_parallel_steps_are_equal,
    assert_steps_are_equal,
    share_out,
)
from tests.support.vllm.engine import Engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "experts", "sizes", "options"),
    [
        (V32, STATIC, DYNAMIC, {}, BOTH),
        (GLM, DYNAMIC, INT4, SHARING, INDEXERS),
        (GLM, DYNAMIC, DYNAMIC, SHARING, BOTH),
        (GLM, DYNAMIC, DYNAMIC, {}, {**BOTH, **REUSING}),
    ],
    ids=["V3.2", "GLM-5.2 with indexers", "GLM-5.2", "GLM-5 with an index cache"],
)
def test_caches_in_int8(
    name: str, attention: str, experts: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Static bytes are prepared by operators of their own, those by token by one."""
    model = make_model(tmp_path, name, attention, experts, **sizes)
    for npus in start(1, model, **share_out(2), **QUANTIZED, **options):
        assert npus.run(find_types) == [[({"int8"}, {"int8"} if "kv_cache_dtype" in options else {"bfloat16"})] * 2]
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_caches_of_data_parallel_ranks_in_int8(tmp_path: Path) -> None:
    prompts, arrive = [make_prompts(30, 7, 200, 90), make_prompts(40, 11)], [(0, 0, 1, 3), (0, 3)]
    for npus in start(2, make_model(tmp_path, experts=INT4, **SHARING), **QUANTIZED, **BOTH):
        assert_data_parallel_prefills_are_close(npus, 0.0)
        assert_data_parallel_steps_are_equal(npus, prompts, arrive)


@pytest.mark.slow
def test_caches_in_int8_with_context_parallel_attention(tmp_path: Path) -> None:
    """As GLM-5.2 is served: ranks gather keys in int8 and their scales, and attend from chunks of the tokens."""
    for npus in start(1, make_model(tmp_path, experts=INT4, **SHARING), **SHARED_OUT, **QUANTIZED, **BOTH):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_drafts_that_read_caches_in_int8(tmp_path: Path) -> None:
    model = make_model(tmp_path, drafts=True, **SHARING)
    for npus in start(1, model, **share_out(2), **QUANTIZED, **BOTH, **DRAFTS):
        assert_drafts_are_equal(npus, accepts=False)


@pytest.mark.slow
def test_a_prefill_node_stores_keys_of_an_indexer_run_by_run(tmp_path: Path) -> None:
    model, allowed = make_model(tmp_path, **SHARING), {"DBO_KV_CONNECTORS": "HookRecorder"}
    for npus in start(1, model, allowed, **share_out(2), **QUANTIZED, **BOTH, **PRODUCER):
        assert npus.run(find_storing) == [[True] * 2]
        assert_steps_are_equal(npus)


def find_storing(engine: Engine, rank: int) -> list[bool]:
    """Return whether each worker stores runs of keys."""
    found: list[bool] = engine.llm.collective_rpc(_find_storing)
    return found


def _find_storing(worker: Any) -> bool:
    return bool(worker.model_runner.ascend_config.c8_reshape_optim_enabled)
