"""The features with which a model runs unsplit, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.platforms.cpu import CpuPlatform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.unsupported import check_config, list_unsupported
from tests.support.vllm.configs import LORA, SIZE, make_config

FEATURES: list[tuple[dict[str, Any], str]] = [
    (
        {"pipeline_parallel_size": 2, "enable_sp": True},
        "pipeline parallel with sequence parallelism (enable_sp)",
    ),
    ({"enable_elastic_ep": True}, "elastic expert parallel"),
    ({"enable_eplb": True}, "expert load balancing (EPLB)"),
    ({"decode_context_parallel_size": 2}, "decode context parallel"),
    ({"prefill_context_parallel_size": 2}, "prefill context parallel"),
    ({"enable_return_routed_experts": True}, "returning the routed experts"),
    ({"use_ubatching": True}, "vLLM's own micro-batching (--enable-dbo)"),
    ({"lora_config": SimpleNamespace(fully_sharded_loras=True)}, "fully sharded LoRA"),
    ({"lora_config": LORA, "is_moe": True}, "LoRA with a mixture of experts"),
    ({"lora_config": LORA, "use_mla": True}, "LoRA with latent attention"),
    ({"is_hybrid": True, "architecture": "JambaForCausalLM"}, "this model's linear attention"),
    (
        {"is_hybrid": True, "architecture": "Qwen3_5MoeForCausalLM", "use_sequence_parallel_moe": True},
        "sequence-parallel MoE with linear attention",
    ),
    ({"is_attention_free": True}, "a state-space model"),
    ({"is_encoder_decoder": True}, "an encoder-decoder model"),
]


def draft_by(method: str, **more: Any) -> dict[str, Any]:
    """Return a change to speculative decoding by *method*."""
    config = {"method": method, "parallel_drafting": False, "draft_model_config": make_drafter(), **more}
    return {"speculative_config": SimpleNamespace(**config)}


def draft_by_layer_of(model_type: str) -> dict[str, Any]:
    """Return a change to speculative decoding by the MTP layer of a type of model."""
    return draft_by("mtp", draft_model_config=make_drafter(model_type=model_type))


def make_drafter(size: int = SIZE, **config: Any) -> SimpleNamespace:
    return SimpleNamespace(hf_config=SimpleNamespace(**config), get_hidden_size=lambda: size)


DRAFTERS = [
    (draft_by("medusa"), "medusa"),
    (draft_by("dflash", parallel_drafting=True), "dflash (parallel drafting)"),
    (draft_by("draft_model", parallel_drafting=True), "draft_model (parallel drafting)"),
    (draft_by_layer_of("qwen3_next_mtp"), "qwen3_next_mtp"),
]


@pytest.mark.parametrize(("changes", "drafter"), DRAFTERS, ids=[drafter for _, drafter in DRAFTERS])
def test_with_another_drafter_first_steps_are_compared(changes: dict[str, Any], drafter: str) -> None:
    config = make_config(**changes)
    assert check_config(config) is None
    assert list(get_platform("cpu").list_compared(config)) == [f"drafter {drafter}"]


@pytest.mark.parametrize(
    "changes",
    [draft_by(method) for method in ("ngram", "suffix", "draft_model", "eagle", "eagle3")]
    + [draft_by_layer_of(model_type) for model_type in ("deepseek_mtp", "glm4_moe_mtp")],
    ids=["ngram", "suffix", "draft_model", "eagle", "eagle3", "deepseek_mtp", "glm4_moe_mtp"],
)
def test_with_a_known_drafter_nothing_is_compared(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    assert check_config(config) is None
    assert list(get_platform("cpu").list_compared(config)) == []


@pytest.mark.parametrize("drafts_from_states", [False, True])
def test_drafts_with_linear_attention_are_supported_where_they_were_compared(drafts_from_states: bool) -> None:
    config = make_config(is_hybrid=True, architecture="Qwen3_5ForCausalLM", **draft_by("ngram"))
    with patch.object(CpuPlatform, "drafts_from_states", drafts_from_states):
        found = check_config(config)
    expected = Decline("not supported yet: speculative decoding with linear attention", only_micro=True)
    assert found == (None if drafts_from_states else expected)


@pytest.mark.parametrize("are_compared", [False, True])
def test_drafts_in_a_pipeline_are_supported_where_they_were_compared(are_compared: bool) -> None:
    config = make_config(**draft_by("ngram"), pipeline_parallel_size=2)
    with patch.object(CpuPlatform, "drafts_in_pipeline", lambda self, vllm_config: are_compared):
        found = check_config(config)
    expected = Decline("not supported yet: speculative decoding in a pipeline", only_micro=True)
    assert found == (None if are_compared else expected)


@pytest.mark.parametrize("role", [None, "kv_producer", "kv_both", "kv_consumer"])
def test_on_an_npu_pipelines_of_prefill_nodes_draft(role: str | None) -> None:
    config = make_config(kv_transfer_config=None if role is None else SimpleNamespace(kv_role=role))
    assert get_platform("npu").drafts_in_pipeline(config) == (role == "kv_producer")


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_drafter_that_reads_hidden_states_of_another_size_is_refused_before_any_step(method: str) -> None:
    """vLLM would fail after the first one, when it drafts."""
    changes = draft_by(method, draft_model_config=make_drafter(64))
    sizes = "it reads 64 values a token, the model has 128"
    assert check_config(make_config(**changes)) == Decline("the drafter is one for another model", sizes)


@pytest.mark.parametrize(
    "changes",
    [
        draft_by("eagle3", draft_model_config=make_drafter(64, target_hidden_size=SIZE)),
        draft_by("draft_model", draft_model_config=make_drafter(64)),
    ],
    ids=["maps the model's", "reads none"],
)
def test_a_drafter_may_have_a_hidden_size_of_its_own_where_it_reads_the_models(changes: dict[str, Any]) -> None:
    assert check_config(make_config(**changes)) is None


@pytest.mark.parametrize(
    "changes",
    [{}, {"pipeline_parallel_size": 2}, {"enable_sp": True}, {"lora_config": LORA}, {"is_moe": True, "use_mla": True}],
    ids=str,
)
def test_a_config_without_any_of_the_features_can_be_split(changes: dict[str, Any]) -> None:
    assert check_config(make_config(**changes)) is None


@pytest.mark.parametrize(("changes", "feature"), FEATURES, ids=[next(iter(changes)) for changes, _ in FEATURES])
def test_a_feature_that_splitting_does_not_support_is_named(changes: dict[str, Any], feature: str) -> None:
    found = check_config(make_config(**changes))
    assert found == Decline(f"not supported yet: {feature}", only_micro="linear attention" in feature)


def test_routed_experts_are_found_where_vllm_has_them_since_0_32() -> None:
    config = make_config(enable_return_routed_experts=True)
    config.aux_output_config = SimpleNamespace(enable_return_routed_experts=False)
    assert check_config(config) is None
    config.aux_output_config.enable_return_routed_experts = True
    assert check_config(config) == Decline("not supported yet: returning the routed experts")


def test_of_several_features_the_first_is_logged_and_the_doctor_lists_all() -> None:
    config = make_config(
        lora_config=LORA, use_mla=True, enable_eplb=True, **draft_by("eagle", draft_model_config=make_drafter(64))
    )
    unsupported = ("expert load balancing (EPLB)", "LoRA with latent attention")
    features = [Decline(f"not supported yet: {what}") for what in unsupported]
    assert check_config(config) == features[0]
    reasons = [decline.reason for decline in list_unsupported(config)]
    assert reasons == [*(decline.reason for decline in features), "the drafter is one for another model"]


def test_lora_is_named_on_a_platform_whose_mapping_is_not_known() -> None:
    with patch.object(CpuPlatform, "splits_lora", False):
        assert check_config(make_config(lora_config=LORA)) == Decline("not supported yet: LoRA on 'cpu'")
