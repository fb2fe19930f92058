"""Context parallel sparse attention (DSA-CP) in layouts with more to share out: data parallel ranks, keys, weights.

See test_context_parallel.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.support.ascend.context_parallel import SHARED_OUT
from tests.support.ascend.engines import FOUR, OPTIONS, start
from tests.support.ascend.equivalence import (
    assert_data_parallel_prefills_are_close,
    assert_ranks_cut_at_their_own_boundaries_are_equal,
)
from tests.support.ascend.jobs import answer, answer_in_nano_batches, make_prompts
from tests.support.ascend.options import RECORDER, TWO
from tests.support.ascend.sparse_attention import GLM, SHARING, V32, assert_data_parallel_steps_are_equal
from tests.support.vllm.engine import find_difference
from tests.support.vllm.families import make_family

pytestmark = pytest.mark.slow
KEYS = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": OPTIONS["block_size"]}
# With keys and tokens shared out, 0.23 asks an operator for the size of a padded step, which the stand-in refuses.
EVEN = [make_prompts(5, 40, 130, 65)]
SHARDED_LAYERS: list[list[str]] = [[]] if find_release() == LATEST_ASCEND else [[], ["q_b_proj", "o_proj"]]


@pytest.mark.parametrize("name", [V32, GLM])
def test_data_parallel_ranks_cut_at_their_own_boundaries_are_equal(name: str, tmp_path: Path) -> None:
    model = make_family(name, tmp_path, **(SHARING if name == GLM else {}))
    for npus in start(2, model, FOUR, **SHARED_OUT):
        assert_ranks_cut_at_their_own_boundaries_are_equal(npus)


@pytest.mark.parametrize("name", [V32, GLM])
def test_data_parallel_chunks_of_attention_are_equal(name: str, tmp_path: Path) -> None:
    model = make_family(name, tmp_path, **(SHARING if name == GLM else {}))
    prompts, arrive = [make_prompts(30, 7, 200, 90), make_prompts(40, 11)], [(0, 0, 1, 3), (0, 3)]
    for npus in start(2, model, FOUR, **SHARED_OUT):
        assert_data_parallel_prefills_are_close(npus, 0.0)
        assert_data_parallel_steps_are_equal(npus, prompts, arrive)


@pytest.mark.parametrize("has_chunks", [False, True], ids=["keys", "keys and tokens"])
def test_ranks_that_share_out_keys_have_nano_batches(has_chunks: bool, tmp_path: Path) -> None:
    """Of vllm-ascend 0.23 these have no micro-batches."""
    options = {**(SHARED_OUT if has_chunks else TWO), **KEYS}
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), {"DBO_SPLIT": "auto"}, **options):
        ((unsplit, _),) = npus.run(answer, EVEN, 4)
        ((nano, steps),) = npus.run(answer_in_nano_batches, EVEN, 4, 2)
        assert min(steps) == 4, steps
        assert find_difference(unsplit, nano) == 0.0


@pytest.mark.parametrize("layers", SHARDED_LAYERS, ids=lambda layers: "+".join(layers) or "all weights")
def test_prefill_nodes_have_nano_batches(layers: list[str], tmp_path: Path) -> None:
    """Each rank has the last projection in full, or the weights of some layers, which it sends ahead of attention."""
    config = {**SHARED_OUT["additional_config"], **({"layer_sharding": layers} if layers else {})}
    node = {"kv_transfer_config": {**RECORDER["kv_transfer_config"], "kv_role": "kv_producer"}}
    options = {**SHARED_OUT, **RECORDER, **node, "additional_config": config}
    environment = {"DBO_SPLIT": "auto", "DBO_KV_CONNECTORS": "HookRecorder"}
    for npus in start(1, make_family(GLM, tmp_path, **SHARING), environment, **options):
        ((unsplit, _),) = npus.run(answer, EVEN, 1)
        for count in (2, 3):
            ((nano, steps),) = npus.run(answer_in_nano_batches, EVEN, 1, count)
            assert min(steps) == 1, steps
            assert find_difference(unsplit, nano) == 0.0
