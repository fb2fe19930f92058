"""The program of a loaded model's vision encoder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from dbo_runtime.adapters.contract import EncoderAdapter, record_program
from dbo_runtime.adapters.registry import get_encoder_adapter, list_encoders
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.step.failures import call_adapter

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ABSENT = "StageMissingLayer"  # vLLM's placeholder for an encoder that gets no images


class EncoderProgram(NamedTuple):
    """An encoder that can be split, with its adapter and its recorded program."""

    module: torch.nn.Module
    adapter: EncoderAdapter
    program: Program


def record_encoder(
    model: torch.nn.Module, vllm_config: VllmConfig, platform: Platform, collectives: ModelCollectives
) -> EncoderProgram | Decline:
    """Return the program of a loaded multimodal model's encoder, or a decline."""
    names = {type(module).__name__ for module in model.modules()}
    adapters = {name: get_encoder_adapter(name) for name in names & list_encoders()}
    for module in model.modules():
        adapter = adapters.get(type(module).__name__)
        if adapter is not None:
            decline = next(platform.list_unsupported(vllm_config), None) or _check_config(vllm_config)
            if decline is not None:
                return decline
            program = call_adapter(adapter, partial(_record, adapter, module, collectives))
            return program if isinstance(program, Decline) else EncoderProgram(module, adapter, program)
    if ABSENT in names:
        return Decline("the encoder is not loaded")
    return Decline("no adapter is registered for the encoder")


def _record(adapter: EncoderAdapter, encoder: torch.nn.Module, collectives: ModelCollectives) -> Program | Decline:
    return adapter.decline(encoder) or record_program(adapter, encoder, collectives)


def _check_config(vllm_config: VllmConfig) -> Decline | None:
    """Decline vLLM features in use that rule out splitting encoders."""
    compilation, multimodal = vllm_config.compilation_config, vllm_config.model_config.multimodal_config
    if multimodal.mm_encoder_tp_mode == "data":
        return Decline("each rank embeds different images, so there is no communication to hide")
    unsupported = (
        (compilation.compile_mm_encoder, "a compiled encoder"),
        (compilation.cudagraph_mm_encoder, "graphs of the encoder"),
        (vllm_config.lora_config is not None, "LoRA"),
    )
    return next((Decline(f"not supported yet: {what}") for is_used, what in unsupported if is_used), None)
