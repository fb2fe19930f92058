"""Keep the results of modules while a model runs, and compare the results of ops with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value

TOLERANCE = 1e-4  # in float32, relative to the largest value: rounding differs by shape


def find_first_mismatch(
    program: Program, unsplit: dict[Value, Any], parts: Sequence[dict[Value, Any]]
) -> tuple[Op, float] | None:
    """Return the first op whose concatenated micro-batch results differ from its unsplit result, with the error."""
    for op in program.ops:
        for value in op.writes:
            pieces = [part[value] for part in parts]
            if not all(isinstance(piece, torch.Tensor) for piece in (unsplit[value], *pieces)):
                continue
            error = compute_relative_error(join_pieces(pieces, unsplit[value]), unsplit[value])
            if error > TOLERANCE:
                return op, error
    return None


def join_pieces(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """Concatenate micro-batches' results along the tokens: the dimension in which they are smaller than *whole*.

    For most models this is the first dimension. Models that vLLM runs with transformers' code have [1, tokens, hidden].
    """
    sizes = [piece.shape for piece in pieces]
    if any(len(size) != whole.dim() for size in sizes):
        return pieces[0]
    differing = [dim for dim in range(whole.dim()) if any(size[dim] != whole.shape[dim] for size in sizes)]
    return torch.cat(list(pieces), dim=differing[0]) if len(differing) == 1 else pieces[0]


def find_first_unmatched(
    program: Program, unsplit: dict[Value, Any], expected: Sequence[torch.Tensor]
) -> tuple[Op, float] | None:
    """Return the op after the last one whose result is among the model's, with the error of the program's result.

    Returns None if the program's result equals the model's, the last of *expected*.
    """
    error = max(compute_relative_error(unsplit[value], expected[-1]) for value in program.outputs)
    if error <= TOLERANCE:
        return None
    known = [any(_is_among(unsplit[value], expected) for value in op.writes) for op in program.ops]
    last = max((number for number, is_known in enumerate(known) if is_known), default=-1)
    return program.ops[min(last + 1, len(program.ops) - 1)], error


def _is_among(item: Any, others: Iterable[torch.Tensor]) -> bool:
    return isinstance(item, torch.Tensor) and any(compute_relative_error(item, other) <= TOLERANCE for other in others)


def compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest expected value; infinite if the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    largest = max(expected.abs().max().item(), torch.finfo(torch.float32).tiny)
    error = (actual - expected).abs().max().item() / largest
    return error if math.isfinite(error) else math.inf


@contextmanager
def listen(model: torch.nn.Module, results: list[torch.Tensor]) -> Iterator[None]:
    """In this context, keep copies of all tensors that the model's modules return."""
    hooks = [module.register_forward_hook(partial(_keep, results)) for module in model.modules() if module is not model]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keep(results: list[torch.Tensor], module: torch.nn.Module, inputs: object, result: object) -> None:
    items = result if isinstance(result, tuple) else (result,)
    results.extend(item.detach().clone() for item in items if isinstance(item, torch.Tensor))
