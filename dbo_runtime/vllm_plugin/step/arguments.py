"""The arguments of a forward, which may run several times, or one micro-batch after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.sequence import IntermediateTensors

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.parallel.stage import Results, copy_tensors


class StepArguments(NamedTuple):
    """The arguments with which vLLM calls a model's forward.

    Attributes:
        input_ids: token ids [tokens]; None if embeddings are given, and on later stages.
        positions: positions [tokens], or [3, tokens] with M-RoPE.
        intermediate_tensors: results of the stage before, each [tokens, ...]; None on the first stage.
        inputs_embeds: embedded tokens [tokens, hidden]; None if the forward embeds the token ids.
        further: all other arguments, by name.
    """

    input_ids: torch.Tensor | None
    positions: torch.Tensor
    intermediate_tensors: IntermediateTensors | None
    inputs_embeds: torch.Tensor | None
    further: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.positions.shape[-1])

    def check_further(self) -> Decline | None:
        """Return why a step with further arguments is not split, or None. Programs do not take such arguments."""
        if not self.further:
            return None
        return Decline("unknown arguments of forward()", ", ".join(sorted(self.further)))

    def check_input_ids(self) -> Decline | None:
        """Return why a program that takes token ids cannot run the step, or None."""
        if self.input_ids is not None and self.input_ids.shape == (self.tokens,):
            return None
        given = "none" if self.input_ids is None else str(list(self.input_ids.shape))
        return Decline("layers choose experts by token ids, which are not given", given)

    def run(self, forward: Callable[..., Results]) -> Results:
        """Call *forward*, which may overwrite embeddings and intermediate tensors."""
        return forward(self.input_ids, self.positions, self.intermediate_tensors, self.inputs_embeds, **self.further)

    def copy(self) -> StepArguments:
        """Return a copy that a forward may overwrite, because norms may add in place."""
        embeds = None if self.inputs_embeds is None else self.inputs_embeds.clone()
        return self._replace(inputs_embeds=embeds, intermediate_tensors=copy_tensors(self.intermediate_tensors))

    def pad(self, tokens: int) -> StepArguments:
        """Return the arguments with copies of the last token at the end, up to *tokens* tokens."""
        missing = tokens - self.positions.shape[-1]
        if missing <= 0:
            return self
        ids, positions, given, embeds, further = self
        return StepArguments(
            None if ids is None else _repeat_last(ids, missing),
            torch.cat([positions, *[positions[..., -1:]] * missing], dim=-1),
            given and IntermediateTensors({name: _repeat_last(each, missing) for name, each in given.tensors.items()}),
            None if embeds is None else _repeat_last(embeds, missing),
            further,
        )

    def cut(self, piece: BatchSlice) -> StepArguments:
        """Return the arguments for the tokens of one slice."""
        ids, positions, given, embeds, further = self
        return StepArguments(
            None if ids is None else ids[piece.tokens],
            positions[..., piece.tokens],
            given and IntermediateTensors({name: each[piece.tokens] for name, each in given.tensors.items()}),
            None if embeds is None else embeds[piece.tokens],
            further,
        )


def _repeat_last(rows: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([rows, *[rows[-1:]] * times])


def join_results(pieces: Sequence[Results]) -> Results:
    """Return the result of a forward, joined from the results of its micro-batches, in their order."""
    first, given = pieces[0], list[Any](pieces)  # all have the type of the first
    if isinstance(first, IntermediateTensors):
        return IntermediateTensors({name: torch.cat([piece[name] for piece in given]) for name in first.tensors})
    if isinstance(first, tuple):
        hidden, auxiliary = zip(*given, strict=True)
        return torch.cat(hidden), [torch.cat(parts) for parts in zip(*auxiliary, strict=True)]
    return torch.cat(given)
