"""The forms in which commands of vllm-ascend's tutorials serve, each as a tiny model over the stand-in.

A form is what decides how steps are split: the architecture, its weights, the drafter, flags, and which parallel sizes
are more than one. Sizes themselves, graphs and connectors are left out: two ranks stand for many, and connectors are
not installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dbo_runtime.vllm_plugin.api.known import SPARSE_MODELS
from tests.support.ascend import deepseek_v4, deepseek_v41, glm5_next, kimi_k3, minimax
from tests.support.ascend.engines import FOUR, OPTIONS, TINY
from tests.support.ascend.families import OPTIONS_OF, make_model
from tests.support.ascend.modelslim import DYNAMIC, INT4, STATIC, quantize_indexers, quantize_model
from tests.support.ascend.mtp_layers import add_mtp_layer, add_qwen_mtp_layer
from tests.support.ascend.options import A3
from tests.support.ascend.recipes import FLAGS, Recipe
from tests.support.vllm.families import MINIMAX_M3
from tests.support.vllm.multimodal_families import INTERNVL

DEEPSEEK = "DeepseekV3ForCausalLM"
WEIGHTS = {"": None, "W8A8_DYNAMIC": (DYNAMIC, DYNAMIC), "W4A8_DYNAMIC": (DYNAMIC, INT4), "W8A8_MIX": (STATIC, DYNAMIC)}
MTP_LAYERS = (DEEPSEEK, "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Glm4MoeForCausalLM")
NOT_IN_FORM = ("eager", "async")  # flags that change nothing of the verdict
CACHES: dict[str, dict[str, Any]] = {
    "c8": {"kv_cache_dtype": "int8"},
    "li_c8": {"attention_config": {"indexer_kv_dtype": "int8"}},
}
INDEX_CACHE = {"use_index_cache": True, "index_topk_freq": 3, "index_skip_topk_offset": 1}
ABSENT_MODELS = ("Gemma4ForConditionalGeneration", "GptOssForCausalLM")


class Form(NamedTuple):
    """How a command serves.

    Attributes:
        architecture: the model's architecture, for InternVL with that of its language model.
        weights: ModelSlim's name of the quantized weights; empty if they are not quantized.
        drafter: method of speculative decoding; empty if there is none, or none that runs over the stand-in.
        flags: flags of the recipe.
        is_parallel: whether there are several ranks: tensor parallel, data parallel, stages, context parallel.
        shares_out_experts: whether expert parallel is on.
    """

    architecture: str
    weights: str
    drafter: str
    flags: tuple[str, ...]
    is_parallel: tuple[bool, ...]
    shares_out_experts: bool

    @property
    def name(self) -> str:
        """A short name."""
        sizes = zip(("TP2", "DP2", "PP2", "DCP2"), self.is_parallel, strict=True)
        layout = [name for name, is_used in sizes if is_used] + ["EP"] * self.shares_out_experts
        return " ".join(filter(None, [self.architecture, self.weights, self.drafter, *layout, *self.flags]))

    @property
    def obstacle(self) -> str:
        """Why the stand-in serves no such model; empty if it does."""
        if self.weights not in WEIGHTS:
            return f"no chip of the stand-in's has the operators of {self.weights}"
        if self.architecture in ABSENT_MODELS:
            return "the stand-in has no such attention"
        if "fmc2" in self.flags and self.weights == INT4:
            return "the stand-in has no fused MC2 of int4"
        return "no chip of the stand-in's has caches in fp8" if {"fp8", "li_fp8"} & set(self.flags) else ""

    @property
    def ranks(self) -> int:
        """Number of data parallel ranks; of a dense model each is a server of its own to vLLM, so one is enough."""
        return 2 if self.is_parallel[1] and self.shares_out_experts else 1


class Server(NamedTuple):
    """A form's tiny model, and how it is served.

    Attributes:
        model: folder of the model.
        options: options of an engine, but for data parallel ones.
        environment: environment variables.
    """

    model: Path
    options: dict[str, Any]
    environment: dict[str, str]

    def list_arguments(self, form: Form) -> list[str]:
        """Return the arguments of `vllm serve`."""
        options = {**self.options, "data_parallel_size": 2 if form.is_parallel[1] else 1}
        return [str(self.model), *(_make_argument(name, value) for name, value in options.items() if value is not None)]


def list_forms(recipes: Iterable[Recipe]) -> dict[Form, list[Recipe]]:
    """Return the forms of all commands that prefill on several ranks, each with its commands."""
    found: dict[Form, list[Recipe]] = {}
    for recipe in recipes:
        if recipe.overlaps and recipe.config is not None:
            found.setdefault(read_form(recipe), []).append(recipe)
    return found


def read_form(recipe: Recipe) -> Form:
    """Return the form of a command."""
    assert recipe.config is not None
    (architecture,) = recipe.config["architectures"]
    if architecture == INTERNVL:
        architecture = f"{INTERNVL}-{recipe.config['llm_config']['architectures'][0]}"
    sizes = (
        recipe.tensor_parallel,
        recipe.data_parallel,
        recipe.pipeline_parallel or "1",
        recipe.decode_context_parallel or "1",
    )
    return Form(
        architecture,
        recipe.scheme if recipe.quantization else "",
        recipe.drafter if _has_drafter(architecture, recipe.drafter) else "",
        tuple(flag for flag in recipe.flags.split() if flag not in NOT_IN_FORM),
        tuple(size != "1" for size in sizes),
        recipe.expert_parallel == "1",
    )


def _has_drafter(architecture: str, drafter: str) -> bool:
    has_layer = architecture in (*MTP_LAYERS, *deepseek_v4.CONFIG["architectures"], glm5_next.GLM5_NEXT)
    return drafter == "qwen3_5_mtp" or (drafter.endswith("mtp") and has_layer)


def make_server(form: Form, folder: Path) -> Server:
    """Write the tiny model of a form to *folder*."""
    model, options = _make_model(form, folder / "source")
    weights, flags = WEIGHTS[form.weights], set(form.flags)
    if weights is not None:
        model = quantize_model(model, folder / "model", *weights)
        if form.architecture == MINIMAX_M3:
            minimax.describe_vision_tower(model)
        if form.architecture in deepseek_v41.CONFIG["architectures"]:
            deepseek_v41.write_index(model)
        options["quantization"] = "ascend"
    if "li_c8" in flags and weights is not None and form.architecture in SPARSE_MODELS:
        quantize_indexers(model)  # of other models, the option alone decides
    if "index_cache" in flags:
        options["hf_overrides"] = {**options.get("hf_overrides", {}), **INDEX_CACHE}
    tensor, _, stages, shares_keys = form.is_parallel
    options |= {
        "tensor_parallel_size": 2 if tensor or shares_keys else 1,
        "pipeline_parallel_size": 2 if stages else 1,
        "decode_context_parallel_size": 2 if shares_keys else 1,
        "cp_kv_cache_interleave_size": 128 if shares_keys else 1,
        "enable_expert_parallel": form.shares_out_experts,
        "distributed_executor_backend": "mp",
    }
    additional = dict(OPTIONS["additional_config"])
    for flag in form.flags:
        additional |= FLAGS.get(flag, {})
        options |= CACHES.get(flag, {})
    environment = {**FOUR, "DBO_SPLIT": "auto", **(A3 if "fmc2" in flags else {})}
    if form.architecture == kimi_k3.KIMI_K3:
        environment |= kimi_k3.ENVIRONMENT
    if flags & {"eplb", "eplb16"}:
        environment["DYNAMIC_EPLB"] = "true"
    return Server(model, {**OPTIONS, **options, "additional_config": additional}, environment)


def _make_model(form: Form, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the model without quantization, and the options that it needs."""
    name, drafter = form.architecture, form.drafter
    drafts = {"speculative_config": {"method": drafter, "num_speculative_tokens": 2}} if drafter else {}
    if name in deepseek_v4.CONFIG["architectures"]:
        return deepseek_v4.make_deepseek_v4(folder, drafts=bool(drafter)), drafts
    if name == kimi_k3.KIMI_K3:
        return kimi_k3.make_kimi_k3(folder), dict(kimi_k3.TEXT_ONLY)
    if name in deepseek_v41.CONFIG["architectures"]:
        return deepseek_v41.make_deepseek_v41(folder), dict(deepseek_v41.SERVED)
    if name == glm5_next.GLM5_NEXT:
        return glm5_next.make_glm5_next(folder, drafts=bool(drafter)), {**glm5_next.TEXT_ONLY, **drafts}
    if name == MINIMAX_M3:
        return minimax.make_minimax(folder), dict(minimax.TEXT_ONLY)
    if name == DEEPSEEK:
        shutil.copytree(TINY, folder)
        return (add_mtp_layer(folder) if drafter else folder), drafts
    model, options = make_model(name, folder), dict(OPTIONS_OF.get(name, {}))
    if drafter == "qwen3_5_mtp":
        return model, {**options, **add_qwen_mtp_layer(model)}
    return (add_mtp_layer(model) if drafter else model), {**options, **drafts}


def _make_argument(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={json.dumps(value) if isinstance(value, Mapping) else value}"
