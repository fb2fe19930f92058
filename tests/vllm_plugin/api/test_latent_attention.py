"""Which latent attention is decomposed, and its rotary embedding then. No engine needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.vllm_plugin.api.latent_attention import SplitLatentAttention, check_attention, get_latent_module
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

ONE = SimpleNamespace(world_size=1)
LAYER = {"use_pcp": False, "hisparse_cache": None}
MODULE = {
    "fuse_qkv_rmsnorm": False,
    "is_sparse": False,
    "indexer": None,
    "g_proj": None,
    "dcp_q_replicate": False,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
}


def make(name: str, **attributes: Any) -> Any:
    """Return an object whose class has this name."""
    return type(name, (SimpleNamespace,), {})(**attributes)


def make_module(
    name: str = "MultiHeadLatentAttentionWrapper",
    rotary: str = "RotaryEmbedding",
    layer: dict[str, Any] | None = None,
    **attributes: Any,
) -> Any:
    rotary_emb = make(rotary, use_flashinfer=attributes.pop("use_flashinfer", False))
    return make(
        name, rotary_emb=rotary_emb, mla_attn=SimpleNamespace(**{**LAYER, **(layer or {})}), **{**MODULE, **attributes}
    )


@pytest.mark.parametrize("rotary", ["RotaryEmbedding", "DeepseekScalingRotaryEmbedding"])
def test_vllms_own_module_is_decomposed(rotary: str) -> None:
    collectives = ModelCollectives(get_platform("cpu"), ONE)
    parts = collectives.decompose_attention(SimpleNamespace(mla_attn=make_module(rotary=rotary)))
    assert isinstance(parts, SplitLatentAttention)
    assert parts.has_latent
    assert collectives.fused_attention_reason is None
    assert not SplitLatentAttention(make_module(q_lora_rank=None)).has_latent


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (make_module("CutlassLatentAttention"), "the class of latent attention runs it as one op (Cutlass"),
        (
            make_module(rotary="MRotaryEmbedding"),
            "the rotary embedding is not known to rotate queries without keys",
        ),
        (make_module(use_flashinfer=True), "one kernel rotates queries and keys"),
        (make_module(fuse_qkv_rmsnorm=True), "one kernel normalizes queries and keys"),
        (make_module(is_sparse=True), "latent attention is sparse"),
        (make_module(indexer=object()), "latent attention is sparse"),
        (make_module(g_proj=object()), "the output of latent attention is gated"),
        (make_module(dcp_q_replicate=True), "latent attention is context parallel"),
        (make_module(layer={"use_pcp": True}), "latent attention is context parallel"),
        (make_module(layer={"hisparse_cache": object()}), "the cache of latent attention is hierarchical"),
    ],
)
def test_a_module_that_is_not_known_stays_one_op_with_a_reason(module: Any, reason: str) -> None:
    collectives = ModelCollectives(get_platform("cpu"), ONE)
    assert collectives.decompose_attention(SimpleNamespace(mla_attn=module)) is None
    assert str(collectives.fused_attention_reason).startswith(reason)
    assert check_attention(module) == collectives.fused_attention_reason


def make_ascend(name: str = "AscendMLAImpl", gate: bool = False, custom_op: object = None, **attributes: Any) -> Any:
    """Return vllm-ascend's module, whose implementation has these attributes."""
    methods = {"mla_preprocess_decode": lambda q_c, kv_no_split, kv_cache, attn_metadata, written_kv=None: None}
    own = {"enable_mlapo": False, "fa_quant_layer": False, "pcp_enabled": False, "fused_qkv_a_proj": None}
    projection = SimpleNamespace(custom_op=custom_op)
    implementation = make(name, o_proj=projection, use_output_gate=gate, **{**methods, **own, **attributes})
    return make("AscendMultiHeadLatentAttention", mla_attn=SimpleNamespace(impl=implementation))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (make_ascend("AscendSFAImpl"), "the class of latent attention runs it as one op (AscendSFAImpl)"),
        (
            make_ascend(mla_preprocess_decode=lambda q_c, kv_no_split, kv_cache, attn_metadata: None),
            "the class of latent attention runs it as one op (AscendMLAImpl)",
        ),
        (make_ascend(enable_mlapo=True), "one kernel projects queries and keys and writes the cache"),
        (make_ascend(fa_quant_layer=True), "one kernel projects queries and keys and writes the cache"),
        (make_ascend(pcp_enabled=True), "latent attention is context parallel"),
        (make_ascend(custom_op=object()), "the last projection of latent attention communicates"),
        (make_ascend(gate=True), "the output of latent attention is gated"),
        (make_ascend(), "None"),
    ],
)
def test_vllm_ascends_module_is_decomposed_or_stays_one_op_with_a_reason(module: Any, reason: str) -> None:
    """Nano-batches cut what is gated, too: their last part takes the gate."""
    collectives = ModelCollectives(get_platform("npu"), ONE)
    attention = SimpleNamespace(mla_attn=module)
    assert (collectives.decompose_attention(attention) is None) == (reason != "None")
    assert str(collectives.fused_attention_reason) == reason
    divided = collectives.divide_attention(attention, lambda module, positions, x: module(positions, x))
    assert (divided is not None) == (reason in ("None", "the output of latent attention is gated"))


def test_attention_of_another_kind_has_no_reason() -> None:
    collectives = ModelCollectives(get_platform("cpu"), ONE)
    for attention in (SimpleNamespace(), SimpleNamespace(mla_attn=None), SimpleNamespace(attn=object())):
        assert get_latent_module(attention) is None
        assert collectives.decompose_attention(attention) is None
    assert collectives.fused_attention_reason is None


@pytest.mark.parametrize("is_scaled", [False, True])
def test_queries_and_keys_rotate_separately_as_they_do_together(is_scaled: bool) -> None:
    """With vLLM's own embeddings, in plain torch, as they run compiled and on CUDA."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import DeepseekScalingRotaryEmbedding, RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        if is_scaled:
            rotary: Any = DeepseekScalingRotaryEmbedding(64, 64, 128, 10000.0, False, 4.0, torch.float32)
        else:
            rotary = RotaryEmbedding(64, 64, 128, 10000.0, False, torch.float32)
    parts = SplitLatentAttention(SimpleNamespace(rotary_emb=rotary, q_lora_rank=8, mla_attn=None))
    queries, keys, positions = torch.randn(5, 3, 64), torch.randn(5, 1, 64), torch.arange(5) * 7
    expected = rotary(positions, queries.clone(), keys.clone())
    assert torch.equal(parts._rotate(positions, queries.clone()), expected[0])
    assert torch.equal(parts._rotate(positions, keys.clone()), expected[1])
