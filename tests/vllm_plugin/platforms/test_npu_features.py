"""Features of vllm-ascend that are not split, by its configuration alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from dbo_runtime.vllm_plugin.platforms.npu_features import _list_unsupported, list_hazards

OPTIONS = MagicMock()  # of vllm-ascend
OPTIONS.configure_mock(
    **{
        "kvpp_config.size": 1,
        "finegrained_tp_config.oproj_tensor_parallel_size": 0,
        "finegrained_tp_config.mlp_tensor_parallel_size": 0,
    }
)


@pytest.mark.parametrize(
    ("stages", "model", "reasons"),
    [
        (1, "DeepseekV3ForCausalLM", []),
        (2, "DeepseekV3ForCausalLM", []),
        (
            1,
            "Qwen3VLMoeForConditionalGeneration",
            ["not supported yet: FlashComm (sequence-parallel MoE) with deepstack"],
        ),
    ],
)
def test_flashcomm_is_split_but_where_it_was_not_compared(stages: int, model: str, reasons: list[str]) -> None:
    chosen: dict[str, Any] = {
        "parallel_config.use_sequence_parallel_moe": True,
        "parallel_config.pipeline_parallel_size": stages,
        "model_config.architecture": model,
    }
    found = {decline.reason for decline in _list_unsupported(make_config(**chosen), OPTIONS)}
    without = make_config(**{**chosen, "parallel_config.use_sequence_parallel_moe": False})
    assert found - {decline.reason for decline in _list_unsupported(without, OPTIONS)} == set(reasons)


@pytest.mark.parametrize(
    ("environ", "is_moe", "spreads_experts", "is_told"),
    [
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, True, True, True),
        ({"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, True, True, False),
        ({}, True, True, False),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, False, True, False),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, True, False, False),
    ],
)
def test_collectives_that_may_wait_for_mc2_are_told_with_the_remedy(
    environ: dict[str, str], is_moe: bool, spreads_experts: bool, is_told: bool
) -> None:
    config = make_config(**{"model_config.is_moe": is_moe, "parallel_config.enable_expert_parallel": spreads_experts})
    found = list(list_hazards(config, environ))
    assert len(found) == is_told
    assert all("deadlock" in what and "unset HCCL_OP_EXPANSION_MODE" in remedy for what, remedy in found)


def make_config(**chosen: Any) -> MagicMock:
    """Return a configuration of vLLM with these values, and any others."""
    config = MagicMock()
    config.configure_mock(**chosen)
    return config
