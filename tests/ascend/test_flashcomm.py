"""FlashComm v1 inside vllm-ascend: layers that pass on chunks of tokens, split as unsplit, to the last bit.

It is vLLM's sequence-parallel MoE, also without data parallel: `parallel_config.use_sequence_parallel_moe`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ascend.conftest import FOUR, OPTIONS, TINY, start
from tests.ascend.test_equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.ascend.test_families import OPTIONS_OF, make_model

FLASHCOMM: dict[str, Any] = {"additional_config": {**OPTIONS["additional_config"], "enable_flashcomm1": True}}
REPLICATED = {"additional_config": {**FLASHCOMM["additional_config"], "enable_shared_expert_dp": True}}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"


def assert_steps_are_equal(npus: Any) -> None:
    """Compare prefills of odd and of even sizes, a request cut inside, and decodes mixed with them."""
    assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
    assert_chunks_are_equal(npus, 400, 83)
    assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED], ids=["shared experts in parts", "replicated"])
def test_split_steps_are_equal_to_unsplit_ones(options: dict[str, Any]) -> None:
    for npus in start(1, **TWO, **options):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "Qwen3_5MoeForCausalLM", V32, GLM])
def test_families(name: str, tmp_path: Path) -> None:
    for npus in start(1, make_model(name, tmp_path), **TWO, **FLASHCOMM, **OPTIONS_OF.get(name, {})):
        assert_steps_are_equal(npus)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FLASHCOMM, REPLICATED], ids=["shared experts in parts", "replicated"])
def test_data_parallel_ranks(options: dict[str, Any]) -> None:
    for npus in start(2, TINY, FOUR, **TWO, **options):
        assert_data_parallel_prefills_are_close(npus, 0.0)
