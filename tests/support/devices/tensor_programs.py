"""Random programs whose values are tensors on a device, and which compute the same numbers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dbo_runtime.ir.program import Program
from tests.support.strategies import Case, Mix

LENGTH = 64  # of every tensor: 512 bytes, the allocator's smallest block, so that freed memory is taken up at once


@dataclass(frozen=True)
class TensorMix:
    """What `Mix` is to lists, to tensors: int64, where sums and products wrap, so that results are exact."""

    mix: Mix
    device: str

    def __call__(self, *tensors: torch.Tensor) -> Any:
        mixed = torch.full((LENGTH,), self.mix.salt, dtype=torch.int64, device=self.device)
        for number, tensor in enumerate(tensors):
            mixed = mixed * 31 + tensor * (2 * number + 3)
        for number in self.mix.overwritten:
            tensors[number].copy_(mixed + number)
        results = [tensors[number] for number in self.mix.overwritten]
        results += [mixed - number for number in range(self.mix.outputs)]
        return results[0] if self.mix.outputs == 1 else tuple(results[: self.mix.outputs])


def with_tensors(case: Case, device: str) -> Case:
    """Return the case with programs whose ops work on tensors of a device."""
    changed: dict[int, Program] = {}
    for program in case.programs:
        ops = tuple(replace(op, fn=TensorMix(op.fn, device)) for op in program.ops)
        changed.setdefault(id(program), replace(program, ops=ops))
    return Case(tuple(changed[id(program)] for program in case.programs), case.order)


def with_all_outputs(case: Case) -> Case:
    """Return the case with programs that return every value there is at the end, so that no fault goes unseen."""
    changed: dict[int, Program] = {}
    for program in case.programs:
        gone = {value for op in program.ops for value in op.overwrites}
        written = (value for op in program.ops for value in op.writes)
        outputs = tuple(value for value in written if value not in gone)
        changed.setdefault(id(program), replace(program, outputs=outputs))
    return Case(tuple(changed[id(program)] for program in case.programs), case.order)


def make_tensors(case: Case, device: str, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs for each micro-batch; other seeds give others, or what an earlier run left would look right."""
    return [
        tuple(
            torch.full((LENGTH,), 1000 * seed + 100 * mb + number, dtype=torch.int64, device=device)
            for number in range(len(program.inputs))
        )
        for mb, program in enumerate(case.programs)
    ]


def read(outputs: Sequence[Sequence[torch.Tensor]]) -> list[list[list[int]]]:
    """Return what tensors hold, when all before is done."""
    return [[tensor.tolist() for tensor in tensors] for tensors in outputs]
