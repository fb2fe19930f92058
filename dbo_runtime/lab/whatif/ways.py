"""Compare the ways to overlap within a step: micro-batches, nano-batches, and the order of ops alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_batch
from dbo_runtime.planner.online.planner import Planner


class Way(NamedTuple):
    """The best that one way makes of a step.

    Attributes:
        name: name of the way.
        parts: number of micro-batches or nano-batches; 0 for the unsplit step.
        seconds: predicted duration of the step.
    """

    name: str
    parts: int
    seconds: float


def compare_ways(table: CostTable, batch: Batch, config: RuntimeConfig) -> list[Way]:
    """Return the unsplit step, and the best that each way makes of it; ways that are not possible are left out.

    Raises:
        ConfigError: an op has no cost.
    """
    planner = Planner(mark_token_wise(build_program(table.program)), table, shapes=[batch])
    ways = [Way("unsplit", 0, planner.predict_unsplit(measure_batch(batch)))]
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
    return ways


def describe_ways(ways: Sequence[Way]) -> str:
    """Return the ways as a table; `*` marks the fastest."""
    unsplit, fastest = ways[0].seconds, min(way.seconds for way in ways)
    lines = [f"{'way':<16}{'parts':>6}  {'ms':>8}  speed-up"]
    for way in ways:
        mark = "*" if way.seconds == fastest else " "
        parts = str(way.parts) if way.parts > 1 else ""
        lines.append(f"{way.name:<16}{parts:>6}{mark} {way.seconds * 1e3:>8.2f}  {unsplit / way.seconds:>7.3f}x")
    return "\n".join(lines)


def mark_token_wise(program: Program) -> Program:
    """Return a program that declares token-wise ops. Where it declares none, all ops but `ordered` ones are taken so.

    Published costs, and cost files of earlier versions, do not say what is token-wise.
    """
    if any(op.token_wise for op in program.ops):
        return program
    return replace(program, ops=tuple(replace(op, token_wise=not op.ordered) for op in program.ops))
