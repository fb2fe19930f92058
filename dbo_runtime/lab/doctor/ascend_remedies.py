"""Remedies of reasons that only vllm-ascend has, and of those of DeepSeek V4, which only vllm-ascend serves split."""

from __future__ import annotations

from dbo_runtime.lab.doctor.remedy import Remedy

ASCEND_REMEDIES = (
    Remedy(
        ("vllm-ascend is not installed",),
        "vLLM's platform is an NPU, which vllm-ascend serves",
        "install vllm-ascend 0.30.0rc2: docs/quickstart-ascend.md",
    ),
    Remedy(
        ("this version of vllm-ascend is not known to dbo_runtime", "vllm-ascend's configuration has changed"),
        "what two micro-batches would share differs from release to release",
        "install vllm-ascend 0.30.0rc2; or DBO_CHECK=1, which compares each split step",
    ),
    Remedy(
        (
            "not supported yet: FlashComm (sequence-parallel MoE) with deepstack",
            "not supported yet: FlashComm in a pipeline with vllm-ascend 0.23",
            "not supported yet: FlashComm 2",
            "not supported yet: MegaMoe (enable_fused_mc2: 2)",
            "not supported yet: products fused with their all-reduce (enable_matmul_allreduce)",
            "not supported yet: a separate stream for the gate (multistream_overlap_gate)",
            "not supported yet: a separate tensor parallel group for o_proj",
            "not supported yet: a separate tensor parallel group for the MLP",
            "not supported yet: shared experts among the routed ones (mix_placement)",
        ),
        "another way to hide or to spare communication, which changes what a layer sends",
        "compare the server with that option and without overlap, and the reverse; keep what is faster",
    ),
    Remedy(
        (
            "not supported yet: dynamic expert load balancing as in vllm-ascend 0.23 (eplb_config)",
            "not supported yet: dynamic expert load balancing in a pipeline",
            "not supported yet: expert load balancing by the load of each step (eplb_policy_type: 3)",
            "not supported yet: an expert map (eplb_config)",
            "not supported yet: an expert map as in vllm-ascend 0.23 (eplb_config)",
            "not supported yet: forced expert load balancing",
        ),
        "experts move, or are counted, in a way that was not compared split",
        "dynamic_eplb with another policy and no pipeline, on 0.30.0rc2, or no balancing: docs/ascend.md#serve",
    ),
    Remedy(
        ("not supported yet: redundant experts, whose weights vllm-ascend does not load (num_redundant_experts)",),
        "answers are wrong with vllm-ascend 0.30.0rc2, split or not: docs/ascend.md#serve",
        "num_redundant_experts: 0",
    ),
    Remedy(
        (
            "not supported yet: decode context parallel in a pipeline",
            "not supported yet: decode context parallel without sparse attention",
            "not supported yet: KV cache pipelines (kvpp_config)",
            "not supported yet: sparse KV offload",
            "not supported yet: xlite graphs",
            "not supported yet: a cache of states after each block (mamba_cache_mode=all)",
        ),
        "a feature of vllm-ascend with which split steps were not made to agree with unsplit ones",
        "if you can serve without it, leave it out; otherwise nothing: such a server runs unsplit",
    ),
    Remedy(
        ("not supported yet: vLLM's second model runner with vllm-ascend",),
        "that runner needs Triton, and nothing has run it here",
        "VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    Remedy(
        (
            "not supported yet: decode context parallel with vllm-ascend 0.23",
            "not supported yet: weights shared out by layer (layer_sharding)",
        ),
        "steps have nano-batches only, which leave attention whole: a micro-batch has no metadata of keys on other "
        "ranks, and would call for a layer's weights twice",
        "DBO_SPLIT=nano, or `auto`",
    ),
    Remedy(
        ("not supported yet: int8 caches of dense attention (kv_cache_type: C8)",),
        "steps have nano-batches only: the second part of a prompt that is cut would read the first part's keys in "
        "int8, where its step has them in floats",
        "DBO_SPLIT=nano, or `auto`",
    ),
    Remedy(
        ("not supported yet: FlashComm with sparse attention and vllm-ascend 0.23, without enable_dsa_cp",),
        "steps have nano-batches only: a micro-batch has no cache slots for the tokens that pad its step",
        "DBO_SPLIT=nano, or `auto`; or enable_dsa_cp, with which micro-batches have them",
    ),
    Remedy(
        ("stages of a pipeline pass on which keys sparse attention has chosen",),
        "steps have nano-batches only; with enable_dsa_cp vllm-ascend's own answers are wrong there: "
        "docs/ascend.md#bugs-of-vllm-ascend",
        "DBO_SPLIT=nano, or `auto`; or serve GLM-5 without --pipeline-parallel-size",
    ),
    Remedy(
        (
            "DeepSeek V4 is split as vllm-ascend's class only",
            "DeepSeek V4.1 is split as vllm-ascend's class only",
            "GLM-5.3-Flash is split as vllm-ascend's class only",
        ),
        "vLLM's own class of the model has other layers",
        "serve it with vllm-ascend",
    ),
    Remedy(
        (
            "layers of DeepSeek V4 pass on which keys were chosen (use_index_cache)",
            "context parallel sparse attention (enable_dsa_cp) of DeepSeek V4 without FlashComm",
            "GLM-5.3-Flash without hyper-connections (mhc) is not supported",
        ),
        "a variant of the model that its adapter does not take",
        "leave out the option that the reason names; its MTP layers do draft",
    ),
    Remedy(
        ("this variant of Kimi-K3 is not supported",),
        "a variant of the model that its adapter does not take, as the detail says",
        "add --enable-expert-parallel, or leave out the drafter, if the detail names it; others run unsplit",
    ),
    Remedy(
        ("tokens of an image see each other in DeepSeek V4",),
        "steps have nano-batches only: metadata of micro-batches would have to know where images are",
        "DBO_SPLIT=nano, or `auto`",
    ),
    Remedy(
        ("layers of DeepSeek V4.1 pass on which keys were chosen",),
        "steps have nano-batches only: micro-batches would write each other's chosen keys over",
        "DBO_SPLIT=nano, or `auto`",
    ),
)
