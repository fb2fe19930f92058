"""Compare the ways to overlap within a step: micro-batches, nano-batches, both, and the order of ops alone.

The planner does not choose micro-batches that are cut into nano-batches: by published costs they gain hardly more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from dbo_runtime.batch import Batch, BatchSlice, split_evenly
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.nano_batches import NO_ROWS, cut_program
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_batch, measure_slices
from dbo_runtime.planner.online.named_order import compute_end
from dbo_runtime.planner.online.nano_orders import divide_measured
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import Predictor

MICRO_BATCHES, NANO_BATCHES = (2, 3), (2, 4)
"""Numbers of micro-batches, and of nano-batches in each, that are tried together."""


class Way(NamedTuple):
    """The best that one way makes of a step.

    Attributes:
        name: name of the way.
        parts: number of micro-batches or nano-batches; 0 for the unsplit step.
        seconds: predicted duration of the step.
        nano_batches: number of nano-batches in each micro-batch; 0 if these are not cut.
    """

    name: str
    parts: int
    seconds: float
    nano_batches: int = 0


def compare_ways(table: CostTable, batch: Batch, config: RuntimeConfig) -> list[Way]:
    """Return the unsplit step, and the best that each way makes of it; ways that are not possible are left out.

    Raises:
        ConfigError: an op has no cost.
    """
    program = mark_token_wise(build_program(table.program))
    planner = Planner(program, table, shapes=[batch])
    ways, both = [Way("unsplit", 0, planner.predict_unsplit(measure_batch(batch)))], list[Way]()
    always = replace(config, mode="always")
    for name, settings in (
        ("micro-batches", replace(always, split="micro")),
        ("nano-batches", replace(always, split="nano")),
        ("order alone", replace(always, split="nano", micro_batches=1)),
    ):
        choice = planner.choose(batch, settings)
        if not isinstance(choice, Decline):
            prediction = choice.prediction
            ways.append(Way(name, prediction.nano_batches or prediction.micro_batches, prediction.split))
    divided = divide_measured(program.fold_side(), table)
    for count in MICRO_BATCHES:
        choice = planner.choose(batch, replace(always, split="micro", micro_batches=count))
        if not isinstance(choice, Decline) and len(choice.slices) == count:
            both += _predict_both(divided, table, batch, choice.slices)
    return [*ways, *sorted(both, key=lambda way: way.seconds)[:1]]


def _predict_both(program: Program, table: CostTable, batch: Batch, slices: Sequence[BatchSlice]) -> Iterator[Way]:
    """Yield the step in these micro-batches, each cut into nano-batches, for each number of these; parts alternate."""
    predictor, micro_batches = Predictor(program, table), measure_slices(batch, slices)
    for count in NANO_BATCHES:
        if min(each.tokens for each in micro_batches) < count:
            continue
        programs = [cut_program(program, count, NO_ROWS).program] * len(slices)
        features = [
            part for each in micro_batches for part in (each, *map(BatchFeatures, split_evenly(each.tokens, count)))
        ]
        end = compute_end(predictor.simulate(lower(programs, alternate(programs)), features))
        yield Way("both", len(slices), table.host.time_split(end, batch.tokens), count)


def describe_ways(ways: Sequence[Way]) -> str:
    """Return the ways as a table; `*` marks the fastest."""
    unsplit, fastest = ways[0].seconds, min(way.seconds for way in ways)
    lines = [f"{'way':<16}{'parts':>6}  {'ms':>8}  speed-up"]
    for way in ways:
        mark = "*" if way.seconds == fastest else " "
        parts = str(way.parts) if way.parts > 1 else ""
        parts += f"x{way.nano_batches}" if way.nano_batches else ""
        lines.append(f"{way.name:<16}{parts:>6}{mark} {way.seconds * 1e3:>8.2f}  {unsplit / way.seconds:>7.3f}x")
    return "\n".join(lines)


def mark_token_wise(program: Program) -> Program:
    """Return a program that declares token-wise ops. Where it declares none, all ops but `ordered` ones are taken so.

    Published costs, and cost files of earlier versions, do not say what is token-wise.
    """
    if any(op.token_wise for op in program.ops):
        return program
    return replace(program, ops=tuple(replace(op, token_wise=not op.ordered) for op in program.ops))
