"""Speculative decoding as vLLM 0.30.0 configures it: the drafter and the number of draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def name_drafter(vllm_config: VllmConfig) -> str | None:
    """Return the drafting method's name, with the model type if there are several types; None without a drafter."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    if speculative.parallel_drafting:
        return f"{speculative.method} (parallel drafting)"
    if speculative.method == "mtp":
        return str(speculative.draft_model_config.hf_config.model_type)
    return str(speculative.method)


def compare_hidden_sizes(vllm_config: VllmConfig) -> str | None:
    """Return both sizes of hidden states if the drafter reads another size than the model has; None if they fit.

    vLLM itself fails only when it first drafts, which on a CPU is after a request's first step.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in ("eagle", "eagle3", "mtp"):
        return None
    drafter, actual = speculative.draft_model_config, vllm_config.model_config.get_hidden_size()
    read = getattr(drafter.hf_config, "target_hidden_size", None) or drafter.get_hidden_size()
    return None if read == actual else f"it reads {read} values a token, the model has {actual}"


def count_drafts(vllm_config: VllmConfig) -> int:
    """Return the largest number of draft tokens per request in a decode; 0 without speculative decoding."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def count_assumed_drafts(vllm_config: VllmConfig) -> int:
    """Return by how many tokens the host's length of a decoding sequence may be too long.

    With async scheduling, a step is prepared before it is known which of the previous step's drafts were accepted. The
    host counts all of them (`_prepare_inputs` in gpu_model_runner.py corrects the device's copy).
    """
    return count_drafts(vllm_config) if vllm_config.scheduler_config.async_scheduling else 0


def get_auxiliary_layers(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the layer counts after which a model's forward returns auxiliary hidden states, for Eagle3's drafter."""
    return next(_list_auxiliary_layers(model), ())


def _list_auxiliary_layers(model: Any) -> Iterator[tuple[int, ...]]:
    for module in model.modules():
        layers = getattr(module, "aux_hidden_state_layers", ())
        if layers:
            yield tuple(sorted(set(layers)))
