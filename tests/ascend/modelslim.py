"""Weights in int8, in the files that ModelSlim writes: vllm-ascend serves them with `--quantization ascend`.

Each matrix is rounded to int8 with a scale for each row of output. Activations are quantized by token
("W8A8_DYNAMIC"), or by a scale for all of a layer's ("W8A8"), which ModelSlim finds by calibration; here it is a
constant, because tests compare a quantized model with itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DYNAMIC, STATIC = "W8A8_DYNAMIC", "W8A8"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
MLP = ("gate_proj", "up_proj", "down_proj")
LARGEST = 127
INPUT_SCALE, INPUT_OFFSET = 0.04, 5  # of static activations: they are clipped at about 5


def quantize_model(model: Path, folder: Path, attention: str = STATIC) -> Path:
    """Write *model* to *folder* with projections of attention quantized so, and all MLPs and experts by token."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    schemes = {**dict.fromkeys(ATTENTION, attention), **dict.fromkeys(MLP, DYNAMIC)}
    written: dict[str, torch.Tensor] = {}
    description = {"model_quant_type": STATIC}
    for name, tensor in load_file(model / "model.safetensors").items():
        layer, _, kind = name.rpartition(".")
        scheme = schemes.get(layer.rpartition(".")[2], "FLOAT") if kind == "weight" else "FLOAT"
        tensors = {name: tensor} if scheme == "FLOAT" else quantize_matrix(layer, tensor, scheme)
        written |= tensors
        description |= dict.fromkeys(tensors, scheme)
    save_file(written, folder / "quant_model_weight_w8a8.safetensors")
    (folder / "quant_model_description.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


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
