"""The serve commands of vllm-ascend's tutorials, as arguments of `vllm serve` for models without weights.

`recipes.csv` has the facts of each: parallel sizes, quantization, drafter, KV connector and flags, from the
documentation in vllm-ascend 0.30.0rc2's source package. Commands that differ in shell variables only are one line.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("recipes.csv")

# What a script leaves to its variables: sizes of which the tutorials print examples.
TENSOR_PARALLEL, DATA_PARALLEL, PIPELINE_PARALLEL = "8", "2", "1"
DRAFTS = 3
FLAGS: dict[str, dict[str, Any]] = {  # of `--additional-config`
    "fc1": {"enable_flashcomm1": True},
    "dsacp": {"enable_dsa_cp": True},
    "fmc2": {"enable_fused_mc2": 1},
    "shdp": {"enable_shared_expert_dp": True},
    "eplb": {"eplb_config": {"dynamic_eplb": True}},
    "lmhead_tensor_parallel_size": {"finegrained_tp_config": {"lmhead_tensor_parallel_size": 2}},
}
OPTIONS = {
    "eager": "--enforce-eager",
    "async": "--async-scheduling",
    "c8": "--kv-cache-dtype=int8",
    "fp8": "--kv-cache-dtype=fp8",
    "li_c8": "--attention-config.indexer_kv_dtype=int8",  # of "lightning indexers"
    "li_fp8": "--attention-config.indexer_kv_dtype=fp8",
    "index_cache": '--hf-overrides={"use_index_cache": true, "index_topk_freq": 4}',
}

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_SPARSE = {
    **DEEPSEEK,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
GLM5 = {
    **DEEPSEEK_SPARSE,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "vocab_size": 154880,
}
GLM52 = {**GLM5, "index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1048576}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        **DEEPSEEK,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
    },
    "vision_config": {},
    "media_placeholder_token_id": 163605,
    "torch_dtype": "bfloat16",
}
QWEN = {"max_position_embeddings": 40960, "vocab_size": 151936, "torch_dtype": "bfloat16", "head_dim": 128}
QWEN_DENSE = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
QWEN_MOE = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752,
    "vocab_size": 151552,
    "torch_dtype": "bfloat16",
}
HY3 = {
    **QWEN_MOE,
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "expert_hidden_dim": 1536,
    "route_norm": True,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
QWEN_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "torch_dtype": "bfloat16",
    "text_config": {
        **QWEN,
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {"model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "out_hidden_size": 4096},
}
QWEN_VL_MOE = {
    **QWEN_VL,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **QWEN_VL["text_config"],
        **{name: QWEN_MOE[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
        "model_type": "qwen3_vl_moe_text",
        "norm_topk_prob": True,
    },
    "vision_config": {**QWEN_VL["vision_config"], "model_type": "qwen3_vl_moe"},
}
# By the page, one size of a family for all of its models. On other pages models have no adapter, or none is named.
MODELS: dict[str, dict[str, Any]] = {
    "DeepSeek-R1": DEEPSEEK,
    "DeepSeek-V3.1": DEEPSEEK,
    "DeepSeek-V3.2": DEEPSEEK_SPARSE,
    "dynamic_chunked_pipeline_parallel": DEEPSEEK,
    "pd_disaggregation_mooncake_multi_node": DEEPSEEK,
    "ray": QWEN_MOE,
    "Qwen3-235B-A22B": QWEN_MOE,
    "Qwen3-30B-A3B": QWEN_MOE,
    "Qwen3-Dense": QWEN_DENSE,
    "suffix_speculative_decoding": QWEN_DENSE,
    "Qwen-VL-Dense": QWEN_VL,
    "Qwen3-VL-235B-A22B-Instruct": QWEN_VL_MOE,
    "Qwen3-VL-30B-A3B-Instruct": QWEN_VL_MOE,
    "GLM4.x": GLM,
    "GLM5": GLM5,
    "GLM5.2": GLM52,
    "GLM5.3": GLM52,  # of the same base model
    "Hy3-preview": HY3,
    "Kimi-K2.5": KIMI,
    "Kimi-K2.6": KIMI,
    "Mixtral-8x7B-Instruct-v0.1": MIXTRAL,
}
PACKAGES = {  # that connectors and drafters import; nothing of them is called for a configuration
    "mooncake.engine": "class TransferEngine: ...",
    "mooncake.store": "class ReplicateConfig: ...\nclass MooncakeDistributedStore: ...",
    "arctic_inference.suffix_decoding": "class SuffixDecodingCache: ...",
}
DRAFTERS: dict[str, dict[str, Any]] = {  # those that are models of their own, by method
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 16384,
        "draft_vocab_size": 32000,
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "intermediate_size": 16384,
    },
}


class Recipe(NamedTuple):
    """A command; the fields are the columns of the file, and empty where it says nothing or leaves it to a variable."""

    page: str
    line: str
    model: str
    tensor_parallel: str
    data_parallel: str
    pipeline_parallel: str
    expert_parallel: str
    quantization: str
    drafter: str
    connectors: str
    kv_role: str
    flags: str
    decode_context_parallel: str
    prefill_context_parallel: str
    second_runner: str
    prefix_caching: str
    cudagraph_mode: str

    @property
    def config(self) -> dict[str, Any] | None:
        """A config.json of its model's family; None if that has no adapter, or the command names no model."""
        return MODELS.get(self.page.removesuffix(".md"))

    @property
    def scheme(self) -> str:
        """What ModelSlim calls its quantized weights, by the model's name; W8A8 if that says nothing."""
        told = re.search(r"w\d+a\d+", self.model, re.IGNORECASE)
        return f"{told[0].upper() if told else 'W8A8'}_DYNAMIC"

    @property
    def overlaps(self) -> bool:
        """Whether it prefills on more than one rank: where dual-batch overlap would pay."""
        sizes = self.tensor_parallel, self.data_parallel, self.pipeline_parallel
        return sizes != ("1", "1", "1") and self.kv_role != "kv_consumer"


def read_recipes() -> list[Recipe]:
    """Return all commands."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Recipe(**row) for row in csv.DictReader(file)]


def make_command(recipe: Recipe, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write a model without weights to *folder*; return the arguments of `vllm serve` and its environment variables."""
    config = recipe.config
    assert config is not None
    model = _write(folder / "model", config)
    if recipe.quantization == "ascend":
        _write(model, {"model_quant_type": recipe.scheme}, "quant_model_description.json")
    given = {
        "decode-context-parallel-size": recipe.decode_context_parallel,
        "prefill-context-parallel-size": recipe.prefill_context_parallel,
        "quantization": recipe.quantization,
    }
    arguments = [
        str(model),
        f"--tensor-parallel-size={recipe.tensor_parallel or recipe.decode_context_parallel or TENSOR_PARALLEL}",
        f"--data-parallel-size={recipe.data_parallel or DATA_PARALLEL}",
        f"--pipeline-parallel-size={recipe.pipeline_parallel or PIPELINE_PARALLEL}",
        *(["--enable-expert-parallel"] if recipe.expert_parallel == "1" else []),
        *(f"--{option}={value}" for option, value in given.items() if value),
        *(["--no-enable-prefix-caching"] if recipe.prefix_caching == "off" else []),
        *(OPTIONS[flag] for flag in recipe.flags.split() if flag in OPTIONS),
    ]
    additional = {key: value for flag in recipe.flags.split() for key, value in FLAGS.get(flag, {}).items()}
    if additional:
        arguments.append(f"--additional-config={json.dumps(additional)}")
    if recipe.drafter:
        drafts: dict[str, Any] = {"method": recipe.drafter, "num_speculative_tokens": DRAFTS}
        if recipe.drafter in DRAFTERS:
            text = config.get("text_config", config)
            shared = {name: text[name] for name in ("hidden_size", "num_attention_heads", "vocab_size")}
            drafts["model"] = str(_write(folder / "drafter", {**DRAFTERS[recipe.drafter], **shared}))
        arguments.append(f"--speculative-config={json.dumps(drafts)}")
    if recipe.connectors:
        arguments.append(f"--kv-transfer-config={json.dumps(_make_transfer(recipe))}")
    if recipe.cudagraph_mode:
        arguments.append(f"--compilation-config={json.dumps({'cudagraph_mode': recipe.cudagraph_mode})}")
    for name, content in PACKAGES.items():
        _write_package(folder / "packages", name, content)
    variables = {"PYTHONPATH": str(folder / "packages")}
    if recipe.second_runner:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = recipe.second_runner
    if "eplb" in recipe.flags.split():
        variables["DYNAMIC_EPLB"] = "true"
    return arguments, variables


def _make_transfer(recipe: Recipe) -> dict[str, Any]:
    *parts, connector = recipe.connectors.split(",")  # of a `MultiConnector`
    transfer: dict[str, Any] = {"kv_role": recipe.kv_role, "engine_id": "0", "kv_port": "30000"}
    own = {"connectors": [{**transfer, "kv_connector": part} for part in parts]}
    return {**transfer, "kv_connector": connector, **({"kv_connector_extra_config": own} if parts else {})}


def _write_package(folder: Path, name: str, content: str) -> None:
    file = folder.joinpath(*name.split(".")).with_suffix(".py")
    for package in file.relative_to(folder).parents:
        (folder / package).mkdir(exist_ok=True, parents=True)
        (folder / package / "__init__.py").touch()
    file.write_text(content, encoding="utf-8")


def _write(folder: Path, content: dict[str, Any], name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
