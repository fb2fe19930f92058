"""Results of ops, kept while a program or a model runs, and compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dbo_runtime.executor import run_sequential
from dbo_runtime.program import Op, Program, Value

TOLERANCE = 1e-4  # in float32, relative to the largest value: what rounding in other shapes gives


def run_ops(program: Program, given: Sequence[Any]) -> dict[Value, Any]:
    """Run a program op after op, and return copies of all that its ops wrote: later ones may overwrite it."""
    kept: dict[Value, Any] = {}
    ops = tuple(replace(op, fn=partial(_run_and_keep, op, kept)) for op in program.ops)
    run_sequential([replace(program, ops=ops)], [given])
    return kept


def find_first_mismatch(
    program: Program, whole: dict[Value, Any], parts: Sequence[dict[Value, Any]]
) -> tuple[Op, float] | None:
    """Return the first op whose results for the parts, one after the other, are not that for the whole."""
    for op in program.ops:
        for value in op.writes:
            pieces = [part[value] for part in parts]
            if not all(isinstance(piece, torch.Tensor) for piece in (whole[value], *pieces)):
                continue
            apart = compute_relative_error(torch.cat(pieces), whole[value])
            if apart > TOLERANCE:
                return op, apart
    return None


def find_first_unmatched(
    program: Program, whole: dict[Value, Any], own: Sequence[torch.Tensor]
) -> tuple[Op, float] | None:
    """Return the op that follows the last one whose result the model has, too, unless its result is the model's."""
    apart = max(compute_relative_error(whole[value], own[-1]) for value in program.outputs)
    if apart <= TOLERANCE:
        return None
    known = [any(_is_among(whole[value], own) for value in op.writes) for op in program.ops]
    last = max((number for number, is_known in enumerate(known) if is_known), default=-1)
    return program.ops[min(last + 1, len(program.ops) - 1)], apart


def _is_among(item: Any, others: Iterable[torch.Tensor]) -> bool:
    return isinstance(item, torch.Tensor) and any(compute_relative_error(item, other) <= TOLERANCE for other in others)


def compute_relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return by how much two tensors differ, relative to the largest value; infinite if their shapes do."""
    if one.shape != other.shape:
        return math.inf
    apart = (one - other).abs().max().item() / max(other.abs().max().item(), torch.finfo(torch.float32).tiny)
    return apart if math.isfinite(apart) else math.inf


@contextmanager
def listen(model: torch.nn.Module, results: list[torch.Tensor]) -> Iterator[None]:
    """Keep copies of all tensors that modules return meanwhile."""
    hooks = [module.register_forward_hook(partial(_keep, results)) for module in model.modules() if module is not model]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keep(results: list[torch.Tensor], module: Any, given: Any, result: Any) -> None:
    found = result if isinstance(result, tuple) else (result,)
    results.extend(item.detach().clone() for item in found if isinstance(item, torch.Tensor))


def _run_and_keep(op: Op, kept: dict[Value, Any], *reads: Any) -> Any:
    result = op.fn(*reads)
    items = (result,) if len(op.writes) == 1 else result
    copies = (item.clone() if isinstance(item, torch.Tensor) else item for item in items)
    kept.update(zip(op.writes, copies, strict=False))  # whoever runs the op says if these are too few or too many
    return result
