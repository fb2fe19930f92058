"""A program with only a few of its equal layers. Results found for it hold for all equal layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.program_spec import build_program, describe_program, repeat_runs


@dataclass(frozen=True, slots=True)
class FewLayers:
    """A program without most of its equal layers.

    Attributes:
        program: the shortened program; it can be planned, but not run.
        first: position of the first op of the equal layers.
        ops: number of ops in each of these layers.
        kept: number of these layers that are kept.
        omitted: number of these layers that are left out.
    """

    program: Program
    first: int
    ops: int
    kept: int
    omitted: int

    @property
    def end(self) -> int:
        """The position after the last op of the kept equal layers."""
        return self.first + self.kept * self.ops

    def select(self, values: Sequence[float]) -> list[float]:
        """Return the values of the kept ops from *values* of the whole program's ops [ops]."""
        return [*values[: self.end], *values[self.end + self.omitted * self.ops :]]


def keep_few_layers(program: Program, count: int) -> FewLayers | None:
    """Leave out all but *count* equal layers; None if the program has no more, or reads values that they hide."""
    spec = describe_program(program)
    number, run = max(enumerate(spec.runs), key=lambda item: item[1].repeat, default=(0, None))
    if run is None or run.repeat <= count:
        return None
    first = sum(earlier.repeat * len(earlier.ops) for earlier in spec.runs[:number])
    try:
        few = repeat_runs(spec, [count if each is run else each.repeat for each in spec.runs])
    except ConfigError:
        return None
    return FewLayers(build_program(few), first, len(run.ops), count, run.repeat - count)
