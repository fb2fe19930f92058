"""Quantized weights, in the files that ModelSlim writes: vllm-ascend serves them with `--quantization ascend`.

Each matrix is rounded to int8 with a scale for each row of output; those of experts may be to int4 ("W4A8_DYNAMIC").
Activations are quantized by token ("W8A8_DYNAMIC"), or by a scale for all of a layer's ("W8A8"), which ModelSlim finds
by calibration; here it is a constant, because tests compare a quantized model with itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DYNAMIC, STATIC, INT4 = "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"
INT8_INDEXER = "INT8_DYNAMIC"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
LATENT = ("wq_a", "wq_b", "wkv", "wo_b")  # of DeepSeek V4's attention and its indexers, whose other matrices are not
LARGEST, LARGEST_INT4 = 127, 7
PARTS = 16  # into which the sums of rows of `down_proj` are divided, for as many tensor parallel ranks
INPUT_SCALE, INPUT_OFFSET = 0.04, 5  # of static activations: they are clipped at about 5


def quantize_model(model: Path, folder: Path, attention: str = STATIC, experts: str = DYNAMIC) -> Path:
    """Write *model* to *folder* with projections of attention and routed experts quantized so, all MLPs by token."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    schemes = {**dict.fromkeys(ATTENTION, attention), **dict.fromkeys(MLP, DYNAMIC)}
    if attention == DYNAMIC:  # an indexer's queries, which then come from bytes
        schemes |= dict.fromkeys(LATENT, DYNAMIC)
    written: dict[str, torch.Tensor] = {}
    # The version says how int4 is packed, and "group_size" that scales are by row; vllm-ascend 0.30 assumes both.
    int4 = {"version": "1.0.0", "group_size": 0} if experts == INT4 else {}
    description: dict[str, Any] = {"model_quant_type": INT4 if int4 else STATIC, **int4}
    weights = load_file(model / "model.safetensors")
    linear_attention = tuple(name.removesuffix("A_log") for name in weights if name.endswith(".A_log"))
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        scheme = schemes.get(layer.rpartition(".")[2], "FLOAT") if kind == "weight" else "FLOAT"
        if ".compressor." in layer or name.startswith(linear_attention):  # their operators take no bytes
            scheme = "FLOAT"
        if ".experts." in layer:
            scheme = experts
        quantize = quantize_to_int4 if scheme == INT4 else quantize_matrix
        tensors = {name: tensor} if scheme == "FLOAT" else quantize(layer, tensor, scheme)
        written |= tensors
        description |= dict.fromkeys(tensors, scheme)
    save_file(written, folder / "quant_model_weight_w8a8.safetensors")
    (folder / "quant_model_description.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


def quantize_indexers(model: Path) -> Path:
    """Say in the description of *model* that its indexers' keys are cached in int8, as ModelSlim does; return it."""
    file = model / "quant_model_description.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    owners = {name.partition(".indexer.")[0] for name in description if ".indexer." in name}
    description |= {f"{owner}.indexer.quant_type": INT8_INDEXER for owner in owners}
    file.write_text(json.dumps({**description, "indexer_quant_type": INT8_INDEXER}), encoding="utf-8")
    return model


def quantize_matrix(layer: str, weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """Return a matrix [out, in] in int8 and its scales, under the names that ModelSlim gives them."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / LARGEST
    integers = (weight / scales).round().to(torch.int8)
    tensors = {"weight": integers, "weight_scale": scales, "weight_offset": torch.zeros_like(scales)}
    if scheme == STATIC:
        tensors |= {
            "input_scale": torch.tensor([INPUT_SCALE]),
            "input_offset": torch.tensor([INPUT_OFFSET]).to(torch.int8),
            "quant_bias": -INPUT_OFFSET * integers.sum(1, dtype=torch.int32),
            "deq_scale": scales.flatten() * INPUT_SCALE,
        }
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}


def quantize_to_int4(layer: str, weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """Return a matrix [out, in] in int4, two rows in one of int8, its scales, and 8 times the sums of scaled rows."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / LARGEST_INT4
    integers = (weight / scales).round().to(torch.int8)
    parts = PARTS if layer.endswith(("down_proj", ".w2")) else 1
    tensors = {
        "weight": (integers[1::2] << 4) | (integers[::2] & 15),
        "weight_scale": scales,
        "weight_offset": torch.zeros_like(scales),
        "scale_bias": 8 * (integers * scales).unflatten(1, (parts, -1)).sum(2),
    }
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
