"""What each platform supports, and that it is read without torch and without vLLM."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.platforms import cuda, npu, npu_context_parallel, npu_flashcomm
from dbo_runtime.vllm_plugin.platforms.encoder_attention import NpuAttention
from dbo_runtime.vllm_plugin.platforms.npu_features import check_experts
from dbo_runtime.vllm_plugin.platforms.platform import NO_BUFFERS
from dbo_runtime.vllm_plugin.platforms.registry import PLATFORMS, get_platform

PLUGIN = Path(__file__).parents[3] / "dbo_runtime" / "vllm_plugin"
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "vllm_ascend", "torch_npu")))
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin.api import known
from dbo_runtime.vllm_plugin.platforms.registry import PLATFORMS, get_platform
print([str(get_platform(name).check_support(RuntimeConfig(check=True))) for name in PLATFORMS])
"""


def test_platforms_are_read_without_torch_and_without_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(["None"] * len(PLATFORMS)), "")


def test_only_platforms_know_a_platform_by_its_name() -> None:
    """What differs is asked of the platform's object, so that another one takes no change elsewhere."""
    names = "|".join(PLATFORMS)
    compared = re.compile(rf"""(==|!=|\bin) \(?["']({names})["']|is_cpu\(|is_out_of_tree\(|current_platform""")
    files = [path for path in PLUGIN.rglob("*.py") if path.parent.name not in ("platforms", "api")]
    assert len(files) > 30
    assert [f"{path.name}: {found[0]}" for path in files for found in compared.finditer(path.read_text())] == []


@pytest.mark.parametrize(
    ("platform", "check", "reason"),
    [
        ("cpu", False, None),
        ("cpu", True, None),
        ("npu", False, "vllm-ascend is not installed (with DBO_CHECK=1"),
        ("npu", True, None),
        ("cuda", False, "not proven on 'cuda' yet (with DBO_CHECK=1"),
        ("cuda", True, None),
        ("xpu", True, "there is no device for 'xpu'"),
    ],
)
def test_steps_are_split_where_that_is_proven_or_checked(
    platform: str, check: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "read_evidence", lambda: ())  # what GPUs have shown is of some versions of vLLM
    found = get_platform(platform).check_support(RuntimeConfig(enabled=True, check=check))
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(
    ("release", "known"), [("0.30.0rc2", True), ("0.23.0.post1", True), ("0.30.0", False), ("0.31.0", False)]
)
def test_the_version_of_vllm_ascend_decides(release: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "version", lambda name: release)
    found = get_platform("npu").check_support(RuntimeConfig(enabled=True))
    expected = "this version of vllm-ascend is not known to dbo_runtime"
    detail = f"{release}; known: 0.30.0rc2, 0.23.0.post1; with DBO_CHECK=1 steps are"
    assert found is None if known else (found.reason == expected and found.detail.startswith(detail))


def test_with_vllm_ascend_other_models_and_weights_are_not_proven() -> None:
    description = {"model_quant_type": "W8A8", "a.weight": "W8A8_DYNAMIC", "b.weight": "FLOAT", "b.bias": "W4A4"}
    quantized = make_quantized(description)
    assert list_compared(make_served("DeepseekV3ForCausalLM", quantized)) == []
    assert list_compared(make_served("GraniteForCausalLM", quantized), "cpu") == []
    assert list_compared(make_served("GraniteForCausalLM", None)) == ["model GraniteForCausalLM"]
    assert list(get_platform("npu").list_unproven(make_served("GraniteForCausalLM", None))) == [], "it is split"


@pytest.mark.parametrize(
    ("description", "role", "unproven"),
    [
        ({"a.weight": "W8A8", "b.weight": "W4A4"}, None, "W4A4"),
        ({"a.weight": "W8A8", "kv_cache_type": "C8", "indexer_quant_type": "INT8"}, None, "C8, INT8"),
        ({"a.weight": "W8A8", "fa_quant_type": "FAKQuant"}, "kv_producer", None),
        ({"a.weight": "W8A8", "fa_quant_type": "FAKQuant"}, "kv_consumer", "FAKQuant"),
        ({"a.weight": "W8A8", "fa_quant_type": "FAKQuant"}, "kv_both", "FAKQuant"),
        ({"a.weight": "W8A8", "a.self_attn.quant_type": "MXFP8"}, None, "MXFP8"),
        ({"a.weight": "W8A8", "a.indexer.quant_type": "INT8_DYNAMIC"}, None, None),
        ({"a.weight": "W8A8", "kv_cache_type": "", "indexer_quant_type": None, "group_size": 64}, None, None),
        ({"a.weight": ["W8A8"], "b.weight": 8, "model_quant_type": {}}, None, "8, ['W8A8']"),
        ({"a.weight": "W8A8", "a.indexer.quant_type": "W8A8_MXFP8"}, None, "W8A8_MXFP8"),
    ],
)
def test_weights_and_caches_of_vllm_ascend_are_not_proven_by_name(
    description: dict[str, Any], role: str | None, unproven: str | None
) -> None:
    served = make_served("DeepseekV3ForCausalLM", make_quantized(description), role)
    assert list_compared(served) == ([] if unproven is None else [f"quantized weights {unproven}"])


def test_weights_of_another_method_are_not_proven() -> None:
    served = make_served("DeepseekV3ForCausalLM", make_quantized({"a.weight": "W8A8"}, "compressed-tensors"))
    assert list_compared(served) == ["quantized weights compressed-tensors"]


@pytest.mark.parametrize(
    ("description", "sizes", "unknown"),
    [
        ({"model_quant_type": "W4A4_DYNAMIC"}, {"data_parallel_size": 2}, "W4A4_DYNAMIC"),
        ({"model_quant_type": "W4A4_DYNAMIC"}, {"use_sequence_parallel_moe": True}, "W4A4_DYNAMIC"),
        ({"model_quant_type": "W4A4_DYNAMIC"}, {"data_parallel_size": 2, "enable_expert_parallel": False}, None),
        ({"model_quant_type": "W4A4_DYNAMIC"}, {}, None),
        ({"a.experts.0.w1.weight": "W4A16_MXFP4", "b.weight": "W8A8"}, {"data_parallel_size": 2}, "W4A16_MXFP4"),
        ({"a.experts.0.w1.weight": "W8A8_MXFP8", "b.weight": "W8A8"}, {"data_parallel_size": 2}, None),
        ({"model_quant_type": "W4A4", "a.experts.0.w1.weight": "W8A8_DYNAMIC"}, {"data_parallel_size": 2}, None),
        ({"model_quant_type": "W8A8", "a.experts.0.w1.weight": "FLOAT"}, {"data_parallel_size": 2}, None),
    ],
)
def test_experts_that_get_tokens_of_other_ranks_are_known_by_how_their_weights_are_quantized(
    description: dict[str, Any], sizes: dict[str, Any], unknown: str | None
) -> None:
    served = make_configured()
    served.quant_config = make_quantized(description)
    vars(served.parallel_config).update(sizes)
    found = check_experts(served, make_ascend_config(enable_shared_expert_dp=False))
    assert (found and found.detail.partition(";")[0]) == unknown


def test_experts_beside_replicated_ones_get_tokens_of_other_ranks() -> None:
    served = make_configured()
    served.quant_config = make_quantized({"model_quant_type": "W4A4_DYNAMIC"})
    assert check_experts(served, make_ascend_config(enable_shared_expert_dp=True)) is not None
    assert check_experts(served, make_ascend_config(enable_shared_expert_dp=False, enable_flashcomm1=True)) is not None


@pytest.mark.parametrize(
    ("name", "cache", "indexer", "unproven"),
    [
        ("DeepseekV3ForCausalLM", "bfloat16", "auto", None),
        ("DeepseekV3ForCausalLM", "int8", "auto", "int8 cache"),
        ("DeepseekV3ForCausalLM", "mxfp8", "auto", "mxfp8 cache"),
        ("GlmMoeDsaForCausalLM", "int8", "int8", None),
        ("DeepseekV32ForCausalLM", "int8", "auto", None),
        ("GlmMoeDsaForCausalLM", "fp8", "fp8", "fp8 cache of an indexer, fp8 cache of sparse attention"),
    ],
)
def test_caches_are_proven_by_type_and_by_what_is_in_them(
    name: str, cache: str, indexer: str, unproven: str | None
) -> None:
    found = list_compared(make_served(name, None, cache=cache, indexer=indexer))
    assert found == ([] if unproven is None else [f"quantized weights {unproven}"])


@pytest.mark.parametrize(("drafter", "is_proven"), [("ngram", True), ("eagle3", True), ("draft_model", False)])
def test_drafters_are_proven_by_name(drafter: str, is_proven: bool) -> None:
    served = make_served("DeepseekV3ForCausalLM", None, drafter=drafter)
    assert list_compared(served) == ([] if is_proven else [f"drafter {drafter}"])


@pytest.mark.parametrize(("receives", "sends"), [(False, True), (True, False), (False, False)])
def test_a_stage_hands_on_chosen_keys_as_vllm_ascend_says(receives: bool, sends: bool) -> None:
    decoder, model = torch.nn.Module(), torch.nn.Module()
    decoder.topk_indices_buffer = torch.zeros(4, 1)  # type: ignore[assignment]  # no parameter, as there
    decoder.receive_pp_topk_indices, decoder.send_pp_topk_indices = receives, sends  # type: ignore[assignment]
    model.model = decoder
    found = get_platform("npu").find_stage_buffers(model)
    assert (bool(found.received), bool(found.sent)) == (receives, sends)
    assert get_platform("npu").find_stage_buffers(torch.nn.Module()) == NO_BUFFERS


@pytest.mark.parametrize(
    ("release", "encoder", "is_proven"),
    [
        ("0.30.0rc2", "Qwen2_5_VisionTransformer", True),
        ("0.30.0rc2", "Qwen3_VisionTransformer", True),
        ("0.30.0rc2", "OtherVisionTransformer", False),
        ("0.23.0.post1", "Qwen3_VisionTransformer", False),
    ],
)
def test_vision_encoders_are_proven_by_class_with_a_release_of_vllm_ascend(
    release: str, encoder: str, is_proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu, "version", lambda name: release)
    expected = Decline("this vision encoder is not proven with vllm-ascend yet", encoder)
    assert get_platform("npu").check_encoder(encoder) == (None if is_proven else expected)


@pytest.mark.parametrize(("release", "attention"), [("0.30.0rc2", NpuAttention), ("0.23.0.post1", None)])
def test_attention_of_encoders_takes_host_lengths_where_an_encoder_ran(
    release: str, attention: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu, "version", lambda name: release)
    assert get_platform("npu").get_encoder_attention() is attention


def list_compared(served: Any, platform: str = "npu") -> list[str]:
    """Return what of a model is not proven, so that its first steps are compared."""
    return list(get_platform(platform).list_compared(served))


def make_quantized(description: dict[str, Any], method: str = "ascend") -> Any:
    return SimpleNamespace(get_name=lambda: method, quant_description=description)


def make_served(
    architecture: str,
    quantized: Any,
    role: str | None = None,
    drafter: str | None = None,
    cache: str = "auto",
    indexer: str = "auto",
) -> Any:
    """Return what is read of vLLM's configuration."""
    transfer = None if role is None else SimpleNamespace(kv_role=role)
    model = SimpleNamespace(architecture=architecture)
    rest = {
        "quant_config": quantized,
        "kv_transfer_config": transfer,
        "cache_config": SimpleNamespace(cache_dtype=cache),
        "attention_config": SimpleNamespace(indexer_kv_dtype=indexer),
    }
    speculative = None if drafter is None else SimpleNamespace(method=drafter, parallel_drafting=False)
    return SimpleNamespace(model_config=model, speculative_config=speculative, **rest)


@pytest.mark.parametrize("platform", ["npu", "cuda"])
def test_where_devices_have_links_there_is_communication_to_hide_on_one_host(platform: str) -> None:
    one, two = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    assert get_platform(platform).get_transport(Groups(two, two, two), hosts=1) == "device"
    assert get_platform(platform).get_transport(Groups(one, None, one), hosts=1) == "none"


class AscendSFADCPMetadata(SimpleNamespace):
    """Of vllm-ascend's attention whose keys are shared out."""


@pytest.mark.parametrize(("platform", "prefills", "is_told"), [("npu", 2, True), ("npu", 0, False), ("cpu", 2, False)])
def test_slices_of_a_step_that_prefills_are_told_so_where_ranks_share_out_keys(
    platform: str, prefills: int, is_told: bool
) -> None:
    arguments = get_platform(platform).get_build_arguments(AscendSFADCPMetadata(num_prefills=prefills))
    assert [bool(each.global_batch.is_prefilling_np.any()) for each in arguments.values()] == [True] * is_told
    assert get_platform(platform).get_build_arguments(SimpleNamespace(num_prefills=prefills)) == {}


SETTINGS_OF_0_23 = {
    "enable_flashcomm1": False,
    "enable_shared_expert_dp": False,
    "flashcomm2_oproj_tensor_parallel_size": 0,
    "enable_matmul_allreduce": False,
    "multistream_overlap_gate": False,
    "layer_sharding": None,
}


@pytest.mark.parametrize(
    ("setting", "value", "feature"),
    [
        ("enable_flashcomm1", True, None),
        ("enable_shared_expert_dp", True, None),
        ("flashcomm2_oproj_tensor_parallel_size", 2, "FlashComm 2"),
        ("enable_matmul_allreduce", True, "products fused with their all-reduce (enable_matmul_allreduce)"),
        ("multistream_overlap_gate", True, "a separate stream for the gate (multistream_overlap_gate)"),
        ("layer_sharding", ["o_proj"], "weights shared out by layer (layer_sharding)"),
        ("enable_fused_mc2", 1, None),
        ("layer_sharding", None, None),
    ],
)
def test_features_of_vllm_ascend_0_23_are_declined_by_name(
    setting: str, value: Any, feature: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration has none of the settings that 0.30 has added."""
    install_0_23(monkeypatch, **{setting: value})
    assert list_features(make_configured()) == ([] if feature is None else [feature])
    found = list_features(make_configured(ranks_with_keys=2))
    assert "decode context parallel with vllm-ascend 0.23" in found


def test_what_leaves_attention_of_0_23_whole_has_nano_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    install_0_23(monkeypatch, layer_sharding=["o_proj"], multistream_overlap_gate=True)
    found = get_platform("npu").list_unsupported(make_configured(ranks_with_keys=2))
    assert [decline.only_micro for decline in found] == [True, True, False]


@pytest.mark.parametrize(
    ("architecture", "is_cut"),
    [
        ("DeepseekV4ForCausalLM", False),
        ("DeepseekV4ForConditionalGeneration", False),
        ("DeepseekV41ForCausalLM", True),
        ("DeepseekV32ForCausalLM", True),
    ],
)
def test_context_parallel_attention_takes_nano_batches_from_deepseek_v4_alone(
    architecture: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_0_23(monkeypatch)
    monkeypatch.setattr(npu_flashcomm, "is_earlier", lambda config: False)
    served = make_configured()
    served.model_config.architecture = architecture
    for shares_out in (True, False):
        monkeypatch.setattr(npu_context_parallel, "shares_out_tokens", lambda shares_out=shares_out: shares_out)
        assert get_platform("npu").cuts_ops(served) is (is_cut or not shares_out)


@pytest.mark.parametrize(
    ("caches", "role", "is_told"),
    [("C8", None, True), ("C8", "kv_consumer", True), ("C8", "kv_producer", False), ("", None, False)],
)
def test_dense_attention_that_reads_int8_keys_of_a_cut_prompt_has_nano_batches(
    caches: str, role: str | None, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that only produces caches keeps floats."""
    install_0_23(monkeypatch)
    served = make_configured()
    served.quant_config = make_quantized({"model_quant_type": "W8A8", "kv_cache_type": caches})
    served.kv_transfer_config = None if role is None else SimpleNamespace(kv_role=role)
    found = list(get_platform("npu").list_unsupported(served))
    reason = "not supported yet: int8 caches of dense attention (kv_cache_type: C8)"
    assert [(each.reason, each.only_micro) for each in found] == [(reason, True)] * is_told


@pytest.mark.parametrize("setting", ["enable_flashcomm1", "enable_shared_expert_dp"])
def test_flashcomm_of_vllm_ascend_0_23_is_declined_in_pipelines(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = make_configured()
    staged.parallel_config.pipeline_parallel_size = 2
    install_0_23(monkeypatch, **{setting: True})
    assert list_features(staged) == ["FlashComm in a pipeline with vllm-ascend 0.23"]
    install_0_23(monkeypatch)
    assert list_features(staged) == []


@pytest.mark.parametrize("setting", ["enable_flashcomm1", "enable_shared_expert_dp"])
def test_sparse_attention_of_0_23_that_does_not_take_the_chunks_of_flashcomm_has_nano_batches(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = make_configured()
    sparse.model_config.architecture, sparse.additional_config = "GlmMoeDsaForCausalLM", None
    install_0_23(monkeypatch, **{setting: True})
    (found,) = get_platform("npu").list_unsupported(sparse)
    assert found.only_micro
    sparse.additional_config = {"enable_dsa_cp": True}
    assert list_features(sparse) == []


@pytest.mark.parametrize(
    ("settings", "compared"),
    [
        ({}, []),
        ({"enable_flashcomm1": True, "enable_fused_mc2": 1}, ["option enable_flashcomm1", "option enable_fused_mc2"]),
        ({"enable_shared_expert_dp": True}, ["option enable_shared_expert_dp"]),
    ],
)
def test_options_that_were_compared_with_few_models_of_0_23_are_compared(
    settings: dict[str, Any], compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbo_runtime.vllm_plugin.platforms.npu.find_release", lambda: "0.23.0.post1")
    install_0_23(monkeypatch, **settings)
    quantized = make_quantized({"a.weight": "W8A8_DYNAMIC"})
    assert list_compared(make_served("Qwen3MoeForCausalLM", quantized)) == compared
    assert list_compared(make_served("KimiK25ForConditionalGeneration", quantized)) == [
        "model KimiK25ForConditionalGeneration",
        *compared,
    ]


def install_0_23(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Let vllm-ascend 0.23 be installed, as far as its features are read, with these settings."""
    config = ModuleType("vllm_ascend.ascend_config")
    config.get_ascend_config = lambda: make_ascend_config(**{**SETTINGS_OF_0_23, **settings})
    for module in (ModuleType("vllm_ascend"), config):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def list_features(vllm_config: Any) -> list[str]:
    """Return the features in use that are not supported."""
    found = get_platform("npu").list_unsupported(vllm_config)
    return [str(decline).removeprefix("not supported yet: ") for decline in found]


def make_ascend_config(**settings: Any) -> Any:
    """Return a configuration of vllm-ascend with what both releases have, and these settings."""
    return SimpleNamespace(
        finegrained_tp_config=SimpleNamespace(oproj_tensor_parallel_size=0, mlp_tensor_parallel_size=0),
        eplb_config=SimpleNamespace(dynamic_eplb=False, expert_map_path=None),
        xlite_graph_config=SimpleNamespace(enabled=False),
        mix_placement=False,
        **{"enable_fused_mc2": 0, **settings},
    )


def make_configured(ranks_with_keys: int = 1) -> Any:
    """Return what is read of vLLM's configuration to find features."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            use_sequence_parallel_moe=False,
            pipeline_parallel_size=1,
            decode_context_parallel_size=ranks_with_keys,
            data_parallel_size=1,
            enable_expert_parallel=True,
        ),
        quant_config=None,
        kv_transfer_config=None,
        additional_config={},
        model_config=SimpleNamespace(
            architecture="DeepseekV3ForCausalLM", is_hybrid=False, is_moe=True, hf_text_config=SimpleNamespace()
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        speculative_config=None,
        use_v2_model_runner=False,
    )
