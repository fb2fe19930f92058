"""Remedies of reasons that are found when a model is loaded, whatever it is served on."""

from __future__ import annotations

from dbo_runtime.lab.doctor.remedy import Remedy

NOT_NEEDED = "if you can serve without it, leave it out; otherwise nothing: such a server runs unsplit"

LOADING_REMEDIES = (
    Remedy(
        ("this version of vLLM is not supported by dbo_runtime",),
        "names that the hooks need may be elsewhere in this vLLM",
        "install a vLLM that the detail names, 0.30 or 0.32 at best: docs/vllm.md#versions",
    ),
    Remedy(
        ("no adapter is registered",),
        "no adapter says where this architecture communicates",
        "`dbo adapter new ARCHITECTURE` drafts an adapter (docs/write-an-adapter.md), or try DBO_GENERIC=1",
    ),
    Remedy(
        ("its adapter cannot be used",),
        "an installed package registers an adapter that cannot be imported, or is none",
        "repair or uninstall the package that the detail names",
    ),
    Remedy(
        ("its adapter fails with this model and version of vLLM",),
        "the adapter reads what this model or version does not have",
        "`dbo adapter DIR` shows the whole error; serve with a tested version: docs/vllm.md#versions",
    ),
    Remedy(
        ("its first split step fails with this version of vLLM",),
        "an op of the adapter failed in a dummy step before serving; the detail has the error and the line",
        "serve with a tested version (docs/vllm.md#versions), and report the detail",
    ),
    Remedy(
        ("the adapter takes no stages of a pipeline",),
        "an adapter from elsewhere declares whole models only",
        "serve without --pipeline-parallel-size, or see docs/write-an-adapter.md#where-a-model-is-different",
    ),
    Remedy(
        (
            "the program is not one of this pipeline",
            "its adapter does not return the hidden states that the drafter reads",
        ),
        "the adapter's values are not those that the next stage or the drafter takes; the detail names both",
        "correct the adapter: docs/write-an-adapter.md#where-a-model-is-different",
    ),
    Remedy(
        ("a stage of the pipeline has no layers", "the model has no layers"),
        "there is nothing to split",
        "fewer stages, or another VLLM_PP_LAYER_PARTITION",
    ),
    Remedy(
        (
            "its parts are not known",
            "its MLP is not known",
            "its forward does more than that of its backbone",
        ),
        "the model has classes, or a forward, that its adapter was not written for",
        "write an adapter for them (docs/write-an-adapter.md), or try DBO_GENERIC=1 where the model generates",
    ),
    Remedy(
        ("not supported yet: a head in the forward of a model, in a pipeline",),
        "the last stage of a reward model computes more than layers do",
        "serve without --pipeline-parallel-size",
    ),
    Remedy(
        ("there is no device for *",),
        "no device of this package belongs to vLLM's platform",
        "serve on a CPU, an NPU or a GPU; docs/devices.md describes how to add another",
    ),
    Remedy(
        (
            "not proven on * yet",
            "not proven with vLLM's second model runner yet",
            "vLLM's * model runner is not proven on 'cuda' yet",
            "attention backend not proven on 'cuda' yet",
            "not proven on AMD's GPUs yet",
        ),
        "nothing has compared split steps with unsplit ones there yet: docs/devices.md#what-cuda-splits",
        "try DBO_CHECK=1, which compares each split step; for a model runner also VLLM_USE_V2_MODEL_RUNNER=0 or 1",
    ),
    Remedy(
        (
            "not supported yet: elastic expert parallel",
            "not supported yet: expert load balancing (EPLB)",
            "not supported yet: returning the routed experts",
            "not supported yet: decode context parallel",
            "not supported yet: prefill context parallel",
            "not supported yet: pipeline parallel with sequence parallelism (enable_sp)",
            "not supported yet: a state-space model",
            "not supported yet: this model's linear attention",
            "not supported yet: an encoder-decoder model",
            "not supported yet: sequence-parallel MoE with linear attention",
        ),
        "a feature of vLLM with which split steps were not made to agree with unsplit ones",
        NOT_NEEDED,
    ),
    Remedy(
        ("not supported yet: vLLM's own micro-batching (--enable-dbo)",),
        "two kinds of dual-batch overlap would both split the step",
        "leave out --enable-dbo, or do without this package: docs/compared.md says when vLLM's is better",
    ),
    Remedy(
        (
            "not supported yet: speculative decoding in a pipeline",
            "not supported yet: speculative decoding with linear attention",
        ),
        "split steps were compared with other drafters, or in other layouts",
        "take one of the drafters of docs/vllm.md#speculative-decoding, or none",
    ),
    Remedy(
        ("the drafter is one for another model",),
        "hidden sizes differ, and vLLM itself fails when it first drafts",
        "name the drafter of this model in --speculative-config",
    ),
    Remedy(
        ("the KV connector is not known to dbo_runtime",),
        "its layer hooks may need what split steps do differently",
        "a known one, or DBO_KV_CONNECTORS=NAME if it needs its layer hooks only: docs/vllm.md#kv-connectors",
    ),
    Remedy(
        (
            "not supported yet: LoRA on *",
            "not supported yet: fully sharded LoRA",
            "not supported yet: LoRA with a mixture of experts",
            "not supported yet: LoRA with latent attention",
            "not supported yet: LoRA with *=1",
            "layers of the model read several LoRA mappings",
            "the LoRA mapping of this platform is not known",
        ),
        "LoRA is split for dense models on a CPU only: docs/vllm.md#lora",
        "serve merged weights, or leave out the variable that the reason names",
    ),
    Remedy(
        ("fp16 needs the decoder layer's own scaling; serve in bf16 or fp32",),
        "in fp16 vLLM scales inside DeepSeek's layers, between the ops of a split step",
        "--dtype bfloat16",
    ),
    Remedy(
        (
            "DeepSeek with plain attention instead of MLA is not supported",
            "Gemma 4 with embeddings for each layer (hidden_size_per_layer_input) is not supported",
            "Gemma 4 with kv_sharing_fast_prefill is not supported",
            "sparse attention (DeepSeek V3.2) shares index buffers between micro-batches",
            "attention scaling by position is not supported",
            "layers that scale their results are not supported",
            "shared experts on every rank are not supported",
            "norms that depend on time (Voxtral) are not supported",
            "dual chunk attention is not supported",
        ),
        "a variant of the model that its adapter does not take",
        "nothing for this model here; with vllm-ascend V3.2 is split",
    ),
    Remedy(
        ("one rank sums nothing, so there is nothing to stop its forward at",),
        "DBO_GENERIC=1 splits at all-reduces, and one rank has none",
        "spread the model over ranks: --tensor-parallel-size",
    ),
    Remedy(
        ("DBO_GENERIC needs greenlet: pip install 'dbo-runtime[generic]'",),
        "a package is missing",
        "`pip install '.[generic]'` from a checkout",
    ),
    Remedy(
        (
            "its forward sums nothing over ranks, so there is nothing to stop it at",
            "it does not embed tokens outside its forward",
            "its forward fails with a few tokens",
            "its forward reads token ids, not embedded tokens alone",
            "not supported yet without an adapter: tokens that are dispatched to experts",
            "not supported yet without an adapter: a forward with other collectives",
        ),
        "DBO_GENERIC=1 cannot stop this model's forward at its communication",
        "`dbo adapter new ARCHITECTURE` drafts an adapter: docs/write-an-adapter.md",
    ),
    Remedy(
        (
            "DBO_DISPATCH=all_to_all needs every expert on one rank: --enable-expert-parallel",
            "DBO_DISPATCH=all_to_all needs all layers' experts on the same ranks",
            "the adapter does not take chunks of tensor parallel ranks",
        ),
        "tokens cannot be sent to the ranks of their experts only",
        "DBO_DISPATCH=all_gather, or --enable-expert-parallel where it is missing",
    ),
    Remedy(
        ("data parallel shared experts need DBO_DISPATCH=all_to_all",),
        "each rank runs the shared experts on its chunk of the tokens",
        "DBO_DISPATCH=all_to_all, or auto",
    ),
    Remedy(
        (
            "the MoE class cannot be decomposed",
            "the MoE dispatch cannot be decomposed",
            "the MoE method cannot be decomposed",
            "the MoE kernel reduces its own output",
            "the MoE layer *",
        ),
        "dispatch, experts and combine are one kernel or one object, so nothing can run between them",
        "--all2all-backend allgather_reducescatter and a kernel that the detail names, or tensor parallel alone",
    ),
)
