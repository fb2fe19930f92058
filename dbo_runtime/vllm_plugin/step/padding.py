"""Micro-batches of padding. With these, a data parallel rank with few tokens, or none, takes part in a split step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dbo_runtime.batch import BatchSlice
from dbo_runtime.ir.program import Program


def pad_inputs(program: Program, inputs: Mapping[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a step with copies of the last token at the end, up to *tokens* tokens.

    Any kernel takes copies. Zeros would have no scale if tokens are quantized.
    """
    padded = dict(inputs)
    for value in program.inputs:
        if value.token_dim is None:
            continue
        given = inputs[value.name]
        missing = tokens - given.shape[value.token_dim]
        if missing > 0:
            last = given.narrow(value.token_dim, -1, 1)
            padded[value.name] = torch.cat([given, *[last] * missing], dim=value.token_dim)
    return padded


def drop_padding(
    outputs: Sequence[Sequence[torch.Tensor]], slices: Sequence[BatchSlice], tokens: int
) -> list[Sequence[torch.Tensor]]:
    """Return the outputs [micro-batches][outputs] of the micro-batches that have some of a step's *tokens* tokens.

    `share_data_parallel` pads only whole micro-batches, after those with tokens.
    """
    return [output for output, piece in zip(outputs, slices, strict=True) if piece.first_token < tokens]
