"""The head of a model whose own forward scores or projects the hidden states of its backbone.

vLLM's reward models have one (`Qwen2ForRewardModel`). The backbone's forward is split. Then the model's own forward
runs, with a stand-in for the backbone that returns these results, so it computes the same as before. Most poolers do
not need this, because they run after the forward.
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

TRIED_TOKENS = 2  # tokens of the run that shows what a forward does around its backbone
UNKNOWN = "its forward does more than that of its backbone"


class Head:
    """Runs a model's own forward on hidden states that were computed before.

    Args:
        model: model that holds the backbone.
        forward: forward of that model.
    """

    def __init__(self, model: VllmModel, forward: Callable[..., torch.Tensor]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the forward on hidden states [tokens, hidden] -> [tokens, values].

        Raises:
            RuntimeError: if the forward does not call its backbone exactly once, with the arguments that it was given.
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
    """A stand-in for a backbone: its forward returns results computed before, and its attributes are the backbone's."""

    def __init__(self, backbone: torch.nn.Module, hidden: torch.Tensor) -> None:
        super().__init__()
        vars(self).update(backbone=backbone, hidden=hidden, calls=[])  # not as submodules

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states that were computed before."""
        self.calls.append((*args, *kwargs.values()))
        hidden: torch.Tensor = self.hidden
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["backbone"], name)


def find_head(model: VllmModel, vllm_config: VllmConfig) -> Head | Decline | None:
    """Return the head in a model's forward; None if an adapter is registered for the forward, which then has no head.

    It tries the forward with a few tokens and without the backbone. The forward may communicate, so all ranks have to
    call this.
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
    except Exception as error:  # noqa: BLE001 - the forward is unknown; whatever it raises, it is left unsplit
        return Decline(UNKNOWN, f"{owner.__name__}: {describe_error(error)}")
    if not isinstance(results, torch.Tensor) or results.shape[0] != TRIED_TOKENS:
        return Decline(UNKNOWN, f"{owner.__name__}: it returns {type(results).__name__}")
    return head


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
