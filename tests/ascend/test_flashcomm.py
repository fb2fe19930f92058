"""FlashComm v1 inside vllm-ascend: layers that pass on chunks of tokens, split as unsplit, to the last bit.

In 0.30 it is vLLM's sequence-parallel MoE, also without data parallel: `parallel_config.use_sequence_parallel_moe`. In
0.23 it is a flag of each step's forward context, and split steps leave it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.support.ascend.drafts import assert_drafts_are_equal, leave_backend
from tests.support.ascend.engines import FOUR, PIPELINE, TINY, start
from tests.support.ascend.equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_nano_batches_are_equal,
    assert_prefills_are_equal,
)
from tests.support.ascend.families import OPTIONS_OF, make_model
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.modelslim import DYNAMIC, INT4, STATIC, quantize_model
from tests.support.ascend.mtp_layers import DRAFTS, add_mtp_layer
from tests.support.ascend.options import FLASHCOMM, REPLICATED, TWO
from tests.support.ascend.sparse_attention import GLM, SHARING, V32
from tests.support.vllm.drafters import draft_by_eagle3, draft_by_mtp
from tests.support.vllm.engine import find_difference
from tests.support.vllm.families import make_family
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.vision_families import QWEN35_MOE

# Linear attention has nano-batches only in 0.30, and sparse attention in 0.23.
FURTHER = [V32, GLM] if find_release() == LATEST_ASCEND else [QWEN35_MOE]


def assert_steps_are_equal(npus: Ranks) -> None:
    """Compare prefills of odd and of even sizes, a request cut inside, and decodes mixed with them."""
    assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
    assert_chunks_are_equal(npus, 400, 83)
    assert_mixed_steps_are_equal(npus)


def assert_padded_prefills_are_equal(npus: Ranks) -> None:
    """Compare prefills of a number of tokens that vllm-ascend pads."""
    prompts = [make_prompts(5, 40, 64)]
    ((unsplit, _),) = npus.run(answer, prompts)
    for cut in (5, 45):
        ((split, counts),) = npus.run(answer, prompts, 1, [cut])
        assert counts == [{"split": 1, "declined": {}}] * 2
        assert find_difference(unsplit, split) == 0.0


@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED], ids=["shared experts in parts", "replicated"])
def test_split_steps_are_equal_to_unsplit_ones(options: dict[str, Any]) -> None:
    for npus in start(1, **TWO, **options):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED], ids=["shared experts in parts", "replicated"])
def test_stages_of_a_pipeline(options: dict[str, Any]) -> None:
    """Layers of DeepSeek pass on all tokens there, and chunk them for their experts only."""
    for npus in start(1, TINY, FOUR, **TWO, **PIPELINE, **options):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", *FURTHER])
def test_families(name: str, tmp_path: Path) -> None:
    for npus in start(1, make_model(name, tmp_path), **TWO, **FLASHCOMM, **OPTIONS_OF.get(name, {})):
        assert_steps_are_equal(npus)
        assert_padded_prefills_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("name", [V32, GLM])
def test_sparse_attention_has_nano_batches(name: str, tmp_path: Path) -> None:
    """Its steps of an odd number of tokens are padded."""
    for npus in start(1, make_model(name, tmp_path), {"DBO_SPLIT": "auto"}, **TWO, **FLASHCOMM):
        assert_nano_batches_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED], ids=["shared experts in parts", "replicated"])
def test_data_parallel_ranks(options: dict[str, Any]) -> None:
    for npus in start(2, TINY, FOUR, **TWO, **options):
        assert_data_parallel_prefills_are_close(npus, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [TINY.name, GLM])
def test_quantized_weights(name: str, tmp_path: Path) -> None:
    """W8A8; and experts in W4A8 in a model whose layers share chosen keys, as the tutorials have it."""
    if name == GLM:
        source, schemes = make_family(GLM, tmp_path / "source", **SHARING), (DYNAMIC, INT4)
    else:
        source, schemes = TINY, (STATIC, DYNAMIC)
    model = quantize_model(source, tmp_path / "model", *schemes)
    for npus in start(1, model, quantization="ascend", **TWO, **FLASHCOMM):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mtp", "eagle3", GLM])
def test_drafts_are_accepted_as_unsplit(name: str, tmp_path: Path) -> None:
    """The drafter's own layers are sequence parallel, too, and run unsplit."""
    if name == GLM:
        model, drafts = add_mtp_layer(make_family(GLM, tmp_path, **SHARING)), DRAFTS
    else:
        model, drafts = TINY, leave_backend(draft_by_mtp(2) if name == "mtp" else draft_by_eagle3(3))
    for npus in start(1, model, **TWO, **{**drafts, **FLASHCOMM}):
        assert_drafts_are_equal(npus, steps=8)
