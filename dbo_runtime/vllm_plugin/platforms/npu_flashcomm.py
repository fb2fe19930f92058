"""FlashComm v1 as in vllm-ascend 0.23: in a step, layers hand on a chunk of the tokens on each tensor parallel rank.

Read against vllm-ascend 0.23.0.post1. There, each forward context says whether layers do so (`flash_comm_v1_enabled`).
If not, row-parallel layers end in an all-reduce, as in vllm-ascend's own small steps of dense models. Split steps run
so, because schedules hide all-reduces. The runner still expects this rank's chunk from the forward. From 0.30 on, all
this is vLLM's sequence-parallel MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from vllm.distributed import get_tp_group

from dbo_runtime.vllm_plugin.api.forward_context import get_current

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm_ascend.ascend_config import AscendConfig


class FlashComm:
    """FlashComm v1 in one step, which it is left out of.

    Args:
        step: forward context of the step.
    """

    def __init__(self, step: ForwardContext) -> None:
        self._step = step
        self._padding: int = step.pad_size

    @contextmanager
    def left_out(self, contexts: Sequence[ForwardContext]) -> Iterator[None]:
        """Return a context manager in which layers hand on all tokens, in the step's context and in *contexts*."""
        for context in (self._step, *contexts):
            context.flash_comm_v1_enabled, context.pad_size = False, 0
        try:
            yield
        finally:
            self._step.flash_comm_v1_enabled, self._step.pad_size = True, self._padding

    def take_chunks(self, results: Any) -> Any:
        """Return this rank's chunk of each tensor of a forward's *results* [tokens, hidden]."""
        return _map_tensors(self._take_chunk, results)

    def join_chunks(self, results: Any) -> Any:
        """Return all tokens of each tensor, from the chunks of all ranks. Collective."""
        return _map_tensors(self._join_chunks, results)

    def _take_chunk(self, x: torch.Tensor) -> torch.Tensor:
        return _get_chunk(pad(x, (0, 0, 0, self._padding)))

    def _join_chunks(self, chunk: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = get_tp_group().all_gather(chunk, 0)
        return joined[: joined.shape[0] - self._padding]


def run_on_chunk(module: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Run a module that always takes and returns this rank's chunk, between layers that hand on all tokens.

    The last argument is *x* [tokens, hidden]. The results are [tokens, hidden], with zeros for tokens of other ranks.
    """
    *others, x = args
    tokens, context = x.shape[0], get_current()
    padding = -tokens % get_tp_group().world_size
    padded = pad(x, (0, 0, 0, padding))
    results = torch.zeros_like(padded)
    before = context.flash_comm_v1_enabled, context.pad_size
    context.flash_comm_v1_enabled, context.pad_size = True, padding
    try:
        _get_chunk(results).copy_(module(*others, _get_chunk(padded)))
    finally:
        context.flash_comm_v1_enabled, context.pad_size = before
    return results[:tokens]


def has_flashcomm(context: ForwardContext) -> bool:
    """Return whether a forward context says if layers hand on chunks, as in 0.23."""
    return hasattr(context, "flash_comm_v1_enabled")


def is_earlier(config: AscendConfig) -> bool:
    """Return whether vllm-ascend is 0.23, by its configuration."""
    return hasattr(config, "enable_flashcomm1")


def find_flashcomm(context: ForwardContext) -> FlashComm | None:
    """Return FlashComm in a step with this forward context; None if its layers hand on all tokens."""
    return FlashComm(context) if getattr(context, "flash_comm_v1_enabled", False) else None


def replicates_shared_experts(config: AscendConfig) -> bool:
    """Return whether each tensor parallel rank holds the shared experts in full, to run them on its chunk."""
    return bool(config.enable_shared_expert_dp or getattr(config, "enable_flashcomm1", False))


def set_padding(part: ForwardContext) -> None:
    """Set the padding of a micro-batch that runs in a step of its own, with the step's kind of communication."""
    if getattr(part, "flash_comm_v1_enabled", False):
        part.pad_size = part.padded_length - part.num_tokens


def _get_chunk(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of *x*, whose number is a multiple of the ranks."""
    group = get_tp_group()
    chunk: torch.Tensor = x.tensor_split(group.world_size)[group.rank_in_group]
    return chunk


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], results: Any) -> Any:
    """Return results with each tensor replaced: hidden states, or these and a list of auxiliary ones."""
    if isinstance(results, torch.Tensor):
        return function(results)
    return type(results)(_map_tensors(function, each) for each in results)
