"""The serve commands of vllm-ascend's tutorials, as arguments of `vllm serve` for models without weights.

`tests/ascend/recipes` has a file for each release, with the facts of each command: parallel sizes, quantization,
drafter, KV connector and flags. `tutorials` reads them from the documentation in the release's source package.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from tests.support.ascend.recipe_models import MODELS, SCHEMES

FOLDER = Path(__file__).parents[2] / "ascend" / "recipes"
CONFIG_CLASS = Path(__file__).parents[1] / "vllm" / "configuration_internvl_chat.py"  # with its weights

# What a script leaves to its variables: sizes of which the tutorials print examples.
TENSOR_PARALLEL, DATA_PARALLEL, PIPELINE_PARALLEL = "8", "2", "1"
DRAFTS = 3
INTERLEAVED = "128"  # tokens, in all commands with decode context parallel
FLAGS: dict[str, dict[str, Any]] = {  # of `--additional-config`
    "fc1": {"enable_flashcomm1": True},
    "dsacp": {"enable_dsa_cp": True},
    "fmc2": {"enable_fused_mc2": 1},
    "shdp": {"enable_shared_expert_dp": True},
    "eplb": {"eplb_config": {"dynamic_eplb": True}},
    "eplb16": {"eplb_config": {"dynamic_eplb": True, "num_redundant_experts": 16}},
    "lmhead_tensor_parallel_size": {"finegrained_tp_config": {"lmhead_tensor_parallel_size": 2}},
    "layer_sharding": {"layer_sharding": ["q_b_proj", "o_proj"]},
}
FLAGS_OF_0_23: dict[str, dict[str, Any]] = {  # those that are options of vLLM's in later releases
    "c8": {"enable_sparse_sfa_c8": True},
    "li_c8": {"enable_sparse_li_c8": True},
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

NESTED = ("text_config", "llm_config", "thinker_config")  # names of a decoder's configuration

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
        name = self.page.removesuffix(".md")
        return MODELS.get(f"{name}:{self.line}", MODELS.get(name))

    @property
    def scheme(self) -> str:
        """What ModelSlim calls its quantized weights, by the model's name; W8A8 if that says nothing."""
        known = SCHEMES.get(self.model) or SCHEMES.get(f"{self.page.removesuffix('.md')}:{self.line}")
        if known is not None:
            return known
        told = re.search(r"w\d+a\d+", self.model, re.IGNORECASE)
        bits = told[0].upper() if told else "W8A8"
        shared_exponents = re.search(r"mxfp\d+", self.model, re.IGNORECASE)
        return f"{bits}_{shared_exponents[0].upper() if shared_exponents else 'DYNAMIC'}"

    @property
    def needs_mx(self) -> bool:
        """Whether it serves weights or caches of 8 or 4 bits with shared exponents, which the chips before A5 lack."""
        return (
            "MXFP" in self.scheme or "mxfp" in self.quantization or not {"fp8", "li_fp8"}.isdisjoint(self.flags.split())
        )

    @property
    def overlaps(self) -> bool:
        """Whether it prefills on more than one rank: where dual-batch overlap would pay."""
        sizes = self.tensor_parallel, self.data_parallel, self.pipeline_parallel
        return sizes != ("1", "1", "1") and self.kv_role != "kv_consumer"


def read_recipes(release: str = LATEST_ASCEND) -> list[Recipe]:
    """Return all commands of a release's tutorials."""
    with (FOLDER / f"{release}.csv").open(encoding="utf-8", newline="") as file:
        return [Recipe(**row) for row in csv.DictReader(file)]


def make_command(recipe: Recipe, folder: Path, release: str = LATEST_ASCEND) -> tuple[list[str], dict[str, str]]:
    """Write a model without weights to *folder*; return the arguments of `vllm serve` and its environment variables."""
    config, flags = recipe.config, recipe.flags.split()
    assert config is not None
    switches = {**FLAGS, **FLAGS_OF_0_23} if release.startswith("0.23") else FLAGS
    model = _write_model(folder / "model", config, recipe.scheme if recipe.quantization == "ascend" else None)
    given = {
        "decode-context-parallel-size": recipe.decode_context_parallel,
        "cp-kv-cache-interleave-size": INTERLEAVED if recipe.decode_context_parallel else "",
        "prefill-context-parallel-size": recipe.prefill_context_parallel,
        "quantization": recipe.quantization,
    }
    arguments = [
        str(model),
        f"--tensor-parallel-size={recipe.tensor_parallel or recipe.decode_context_parallel or TENSOR_PARALLEL}",
        f"--data-parallel-size={recipe.data_parallel or DATA_PARALLEL}",
        f"--pipeline-parallel-size={recipe.pipeline_parallel or PIPELINE_PARALLEL}",
        *(["--trust-remote-code"] if "auto_map" in config else []),
        *(["--enable-expert-parallel"] if recipe.expert_parallel == "1" else []),
        *(f"--{option}={value}" for option, value in given.items() if value),
        *(["--no-enable-prefix-caching"] if recipe.prefix_caching == "off" else []),
        *(OPTIONS[flag] for flag in flags if flag in OPTIONS and flag not in switches),
    ]
    additional = {key: value for flag in flags for key, value in switches.get(flag, {}).items()}
    if additional:
        arguments.append(f"--additional-config={json.dumps(additional)}")
    if recipe.drafter:
        drafts: dict[str, Any] = {"method": recipe.drafter, "num_speculative_tokens": DRAFTS}
        if recipe.drafter in DRAFTERS:
            text = _find_text(config)
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
        variables["STANDIN_ASCEND_TRITON"] = "1"
    if recipe.needs_mx:
        variables["STANDIN_ASCEND_CHIP"] = "A5"
    if not {"eplb", "eplb16"}.isdisjoint(flags):
        variables["DYNAMIC_EPLB"] = "true"
    return arguments, variables


def _write_model(folder: Path, config: dict[str, Any], scheme: str | None) -> Path:
    _write(folder, config)
    if "auto_map" in config:
        shutil.copy(CONFIG_CLASS, folder)
    if scheme is not None:
        _write(folder, {"model_quant_type": scheme}, "quant_model_description.json")
    return folder


def _find_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model's decoder, which models of several modalities nest."""
    nested = next((config[name] for name in NESTED if name in config), None)
    return config if nested is None else _find_text(nested)


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
