"""A program with few of its equal layers: what is found out with it holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.program_spec import build_program, describe_program, repeat_runs


@dataclass(frozen=True, slots=True)
class FewLayers:
    """A program of which equal layers were left out.

    Attributes:
        program: without them; it can be planned, but not run.
        first: position of the first op of the equal layers.
        ops: of each of them.
        kept: how many of them are left.
        omitted: how many are not.
    """

    program: Program
    first: int
    ops: int
    kept: int
    omitted: int

    @property
    def end(self) -> int:
        """The position after the last op of the equal layers that are left."""
        return self.first + self.kept * self.ops

    def select(self, values: Sequence[float]) -> list[float]:
        """Return of values of the whole program's ops [ops] those of the ops that are left."""
        return [*values[: self.end], *values[self.end + self.omitted * self.ops :]]


def keep_few_layers(program: Program, count: int) -> FewLayers | None:
    """Leave out equal layers but for *count* of them; None if the program has no more, or reads what they hide."""
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
