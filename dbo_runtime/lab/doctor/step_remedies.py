"""Remedies of reasons that are found step by step, and of parts that a model does without."""

from __future__ import annotations

from dbo_runtime.lab.doctor.remedy import Remedy

STEP_REMEDIES = (
    Remedy(
        ("no communication to hide",),
        "all ranks are CPUs of one host, or each layer is on one rank: there is nothing to gain",
        "spread layers over ranks (--tensor-parallel-size) of several hosts, or of chips, whose links work while they "
        "compute; DBO_MODE=always splits all the same, to try it",
    ),
    Remedy(("DBO_MODE is off",), "you said so", "DBO_MODE=auto"),
    Remedy(("starting up",), "vLLM profiles, compiles and warms up with unsplit steps", "nothing; it ends"),
    Remedy(
        ("no gain predicted",),
        "by measured costs this step would not be faster by more than DBO_MARGIN; the detail has both times",
        "nothing, unless costs are stale: `dbo calibrate` again; `dbo plan --costs FILE` explains the prediction",
    ),
    Remedy(
        ("measured slower split",),
        "split and unsplit steps of this kind were timed in turn, and unsplit ones were faster",
        "nothing; calibrate again if the machine was busy then: docs/planner.md#calibration",
    ),
    Remedy(("on probation",), "this step is timed for that comparison", "nothing; it ends"),
    Remedy(
        ("fewer tokens than DBO_MIN_TOKENS", "fewer prefill tokens than DBO_MIN_PREFILL_TOKENS"),
        "without costs `auto` goes by two thresholds",
        "calibrate, or lower the threshold: docs/settings.md",
    ),
    Remedy(
        ("nowhere to cut",),
        "a step of one token, of one request that cannot be cut inside, or a rank without tokens",
        "nothing for decodes of one request; for long prompts leave chunked prefill on",
    ),
    Remedy(
        ("fewer tokens than nano-batches",),
        "a nano-batch of this step, or of a data parallel rank, would have no token",
        "nothing; DBO_MICRO_BATCHES sets the number of nano-batches",
    ),
    Remedy(
        ("no op of the model is declared token-wise", "nano-batches are not for this model"),
        "DBO_SPLIT=nano cuts ops that are declared token-wise, and the adapter declares none",
        "DBO_SPLIT=micro; or declare them: docs/write-an-adapter.md#nano-batches",
    ),
    Remedy(
        ("no balanced cut",),
        "without costs `auto` wants each part to have at least a tenth of an even one's work",
        "calibrate: costs decide then",
    ),
    Remedy(
        ("the first split steps differ from unsplit ones",),
        "the first steps of each kind ran twice and disagreed; nothing is split any more, answers are those of vLLM",
        "report it; DBO_CHECK=1 names the cuts: docs/vllm.md#checking-a-deployment-dbo_check1",
    ),
    Remedy(
        ("vLLM's own step of one token is wrong",),
        "a step that would be compared has one token on a rank; with sequence-parallel MoE vLLM 0.30 answers it wrong",
        "a vLLM with the fix of vLLM issue #50154; steps that are not compared are split, and answered right",
    ),
    Remedy(
        ("full-graph step", "padded batch", "padded to the size of a graph on all data parallel ranks"),
        "vLLM replays a captured graph of the step, mostly a decode",
        "nothing; splitting would lose what the graph gains",
    ),
    Remedy(
        ("MoE communication is fused into its kernels",),
        "MC2's kernels dispatch by themselves in this step (vllm-ascend)",
        "nothing for small steps; the options that matter are in docs/ascend.md#serve",
    ),
    Remedy(
        ("a request reads prefix-cache blocks that a later micro-batch writes",),
        "two requests of the step share a prefix that it computes only now",
        "nothing; the next step finds the prefix in the cache",
    ),
    Remedy(
        ("cascade attention",),
        "requests share a long prefix, and vLLM attends to it once for all",
        "nothing; or --disable-cascade-attn, if splitting gains more",
    ),
    Remedy(
        (
            "a prompt starts with as few tokens as a decode, in a model with linear attention",
            "a decode with drafts is cut inside, in a model with linear attention",
        ),
        "a piece of a request would be taken for another kind of step",
        "nothing; other steps are split",
    ),
    Remedy(
        ("cannot be cut where all ranks agreed to",),
        "data parallel ranks agree on numbers of tokens, and this batch cannot be cut there",
        "nothing if it is rare; with drafts see docs/vllm.md#speculative-decoding",
    ),
    Remedy(
        ("the KV connector takes one layer after the other",),
        "this DBO_POLICY would let a micro-batch attend in a layer too early",
        "DBO_POLICY=optimal or alternate",
    ),
    Remedy(
        ("planning this step failed",),
        "an error in this package; the log has its traceback",
        "report it with the traceback; the step ran unsplit",
    ),
    Remedy(
        (
            "no forward context",
            "no attention metadata (profiling or dummy run)",
            "no data parallel metadata",
            "attention metadata is split already",
            "LoRA mapping of another batch",
            "intermediate tensors of other tokens",
        ),
        "not a step of requests: a profiling or dummy run, or a forward that another caller makes",
        "nothing, unless it is counted in every step: then something else changes vLLM's steps, so report it",
    ),
    Remedy(
        (
            "unknown arguments of forward()",
            "unknown intermediate tensors",
            "unknown per-request or per-token attention metadata",
            "unknown per-token data in the forward context",
            "unknown argument of a builder of attention metadata",
            "attention metadata of unknown origin",
            "attention metadata field not supported yet",
            "attention metadata without sequence lengths on the host",
            "attention metadata without a block table or slots",
            "the attention backend's builder cannot be made again",
            "layers choose experts by token ids, which are not given",
        ),
        "vLLM, a plugin or the backend passes data that this package does not know how to cut",
        "another --attention-backend, or a tested version of vLLM; report the detail",
    ),
)
ENCODER_REMEDIES = (
    Remedy(
        ("no adapter is registered for the encoder", "its encoder's parts are not known"),
        "encoders of Qwen2.5-VL and Qwen3-VL have adapters: docs/vision.md",
        "nothing; the language model is split all the same",
    ),
    Remedy(
        ("vision encoder not proven on 'cuda' yet", "this vision encoder is not proven with vllm-ascend yet"),
        "nothing has compared this encoder split with unsplit there",
        "try DBO_CHECK=1, which compares",
    ),
    Remedy(
        ("each rank embeds different images, so there is no communication to hide",),
        "--mm-encoder-tp-mode data gives each rank whole images",
        "nothing; or leave the option out and compare",
    ),
    Remedy(
        (
            "not supported yet: a compiled encoder",
            "not supported yet: graphs of the encoder",
            "not supported yet: LoRA",
            "encoder attention in fp8, whose scales follow the batch, is not supported yet",
        ),
        "the encoder runs in a way that its pieces would not repeat",
        "leave the option out, if overlap gains more than it does",
    ),
    Remedy(
        ("one image cannot be cut", "no images", "images cannot be shared out"),
        "encoders are cut between images",
        "nothing; several images at a time are split",
    ),
    Remedy(
        ("the encoder is given more than images", "images and their grids do not match"),
        "its forward got arguments that are not known",
        "a tested version of vLLM; report the detail",
    ),
    Remedy(("the encoder is not loaded",), "vLLM serves without images (--limit-mm-per-prompt)", "nothing"),
)
PART_REMEDIES = (
    Remedy(
        (
            "the class of latent attention runs it as one op",
            "latent attention is *",
            "the output of latent attention is gated",
            "the cache of latent attention is hierarchical",
            "the rotary embedding is not known to rotate queries without keys",
            "one kernel rotates queries and keys",
            "one kernel normalizes queries and keys",
            "one kernel projects queries and keys and writes the cache",
            "the last projection of latent attention communicates",
        ),
        "latent attention stays one op, without concurrent ops inside; steps are split all the same",
        "nothing: docs/vllm.md#concurrent-ops-dbo_side",
    ),
    Remedy(
        (
            "compilation is proven on CPU only",
            "vLLM compiles nothing either (enforce_eager)",
            "not supported yet: data parallel",
            "not supported yet: concurrent ops (DBO_SIDE=on)",
        ),
        "DBO_COMPILE=1 has no effect: split steps run eagerly",
        "leave DBO_COMPILE out: docs/vllm.md#compilation",
    ),
    Remedy(
        ("the dummy batches of vLLM's second model runner are not known", "vLLM's dummy batch cannot be split"),
        "costs cannot be measured; thresholds decide",
        "VLLM_USE_V2_MODEL_RUNNER=0 for calibration; otherwise the detail names the reason",
    ),
)
