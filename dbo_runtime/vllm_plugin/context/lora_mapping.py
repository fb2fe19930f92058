"""The LoRA adapter that each token of a micro-batch uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.lora import count_mapped_tokens, is_sliceable, list_wrappers, slice_wrapper

if TYPE_CHECKING:
    import torch
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase


class LoraMapping:
    """vLLM's mapping from a step's tokens to adapters.

    All layers read one punica wrapper, which vLLM updates only if a step's mapping differs from the previous one. While
    a micro-batch runs, the wrapper therefore has the state of a slice; afterwards it has the step's state again.

    Args:
        wrapper: the punica wrapper that the layers read.
    """

    def __init__(self, wrapper: PunicaWrapperBase) -> None:
        self._wrapper = wrapper

    def check(self, tokens: int) -> Decline | None:
        """Decline a step of *tokens* tokens if the mapping does not fit it; otherwise return None."""
        mapped = count_mapped_tokens(self._wrapper)
        if mapped != tokens:
            return Decline("LoRA mapping of another batch", f"{mapped} tokens are mapped, {tokens} are run")
        return None

    @contextmanager
    def split(self, slices: Sequence[BatchSlice]) -> Iterator[Callable[[int], None]]:
        """Yield a function that selects the adapters of a micro-batch, given its index."""
        step = vars(self._wrapper)
        parts = [vars(slice_wrapper(self._wrapper, piece.tokens)) for piece in slices]

        def select(micro_batch: int) -> None:
            self._wrapper.__dict__ = parts[micro_batch]  # a plain assignment: this runs at every switch

        select(0)
        try:
            yield select
        finally:
            self._wrapper.__dict__ = step


def make_lora_mapping(model: torch.nn.Module) -> LoraMapping | Decline | None:
    """Return the mapping that a model's layers read, or a decline if it cannot be split; None without LoRA."""
    wrappers = list_wrappers(model)
    if not wrappers:
        return None
    if len(wrappers) > 1:
        return Decline("layers of the model read several LoRA mappings", f"{len(wrappers)} of them")
    if not is_sliceable(wrappers[0]):
        return Decline("the LoRA mapping of this platform is not known", type(wrappers[0]).__name__)
    return LoraMapping(wrappers[0])
