"""The head of a model that scores or projects in its own forward what its backbone gives.

vLLM's reward models do (`Qwen2ForRewardModel`). The backbone's forward is split; the model's own then runs with the
results in the backbone's place, so that it computes what it did. Most poolers need nothing of this: they run after the
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context

from dbo_runtime.adapters.registry import get_adapter
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.step.failures import describe_error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces_base import VllmModel

TRIED_TOKENS = 2  # of the run that shows what a forward does around its backbone
UNKNOWN = "its forward does more than that of its backbone"


class Head:
    """Runs a model's own forward on hidden states that were computed before.

    Args:
        model: that holds the backbone.
        forward: its own.
    """

    def __init__(self, model: VllmModel, forward: Callable[..., torch.Tensor]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what the forward makes of hidden states [tokens, hidden] -> [tokens, values].

        Raises:
            RuntimeError: if it does not pass on what it is given to its backbone, once.
        """
        backbone = self._model.model
        self._model.model = given = _Given(backbone, hidden)
        try:
            results: torch.Tensor = self._forward(None, positions, None, hidden)
        finally:
            self._model.model = backbone
        if len(given.calls) != 1 or not _are_same(given.calls[0], (None, positions, None, hidden)):
            raise RuntimeError(f"it calls its backbone {len(given.calls)} times, or with other arguments")
        return results


class _Given(torch.nn.Module):
    """Stands in a backbone's place: gives what that has computed, and is that one otherwise."""

    def __init__(self, backbone: torch.nn.Module, hidden: torch.Tensor) -> None:
        super().__init__()
        vars(self).update(backbone=backbone, hidden=hidden, calls=[])  # not as a module of this one

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what was computed before."""
        self.calls.append((*args, *kwargs.values()))
        hidden: torch.Tensor = self.hidden
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["backbone"], name)


def find_head(model: VllmModel, vllm_config: VllmConfig) -> Head | Decline | None:
    """Return the head that is in a model's forward; None if that is its backbone's alone, as adapters take it.

    The forward is tried with a few tokens and without the backbone. It may communicate: to be called on all ranks.
    """
    model_config = vllm_config.model_config
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    if any(get_adapter(name) is not None for name in (model_config.architecture, owner.__name__)):
        return None
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return Decline("not supported yet: a head in the forward of a model, in a pipeline", owner.__name__)
    if not isinstance(getattr(model, "model", None), torch.nn.Module):
        return Decline(UNKNOWN, owner.__name__)
    head = Head(model, model.forward)
    device = next(model.parameters()).device
    hidden = torch.zeros(TRIED_TOKENS, model_config.get_hidden_size(), dtype=model_config.dtype, device=device)
    try:
        with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=TRIED_TOKENS):
            results = head(hidden, torch.arange(TRIED_TOKENS, device=device))
    except Exception as error:  # noqa: BLE001 - this forward is not known; whatever it raises, it is left unsplit
        return Decline(UNKNOWN, f"{owner.__name__}: {describe_error(error)}")
    if not isinstance(results, torch.Tensor) or results.shape[0] != TRIED_TOKENS:
        return Decline(UNKNOWN, f"{owner.__name__}: it returns {type(results).__name__}")
    return head


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
