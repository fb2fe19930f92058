"""Choose the programs that vLLM captures into graphs: whether the ops of a decode overlap there, by costs.

A decode mostly runs from a graph that vLLM captured at start. A replay costs the host the same whatever ops it has, so
a graph gains as soon as the device does: one op communicates while another of the same decode computes, and no weight
is read twice. No step is cut: by all published costs cutting a decode loses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import HostCost
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.selection import decline_unpaid
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.planner.online.split_choice import SplitChoice

CONTEXT_SHARE = 0.25  # length of the context of each decode, as a share of the longest context


def choose_graphs(
    program: Program, table: CostTable, sizes: Sequence[int], limits: ServingLimits, config: RuntimeConfig
) -> Mapping[int, SplitChoice | Decline]:
    """Return the program of each graph, by its number of tokens; a decline where the model's own forward is captured.

    All tokens of a graph are decodes. Nothing is learned from replays, because no step is timed. So a program has to
    gain more than the margin, and must lose nothing if costs are off.

    Args:
        program: ops of one micro-batch.
        table: costs of the ops.
        sizes: numbers of tokens of the graphs.
        limits: largest steps of the scheduler.
        config: settings; their mode has to be `auto`.

    Raises:
        ConfigError: if an op has no cost.
    """
    context = int(CONTEXT_SHARE * limits.context)
    decodes = {size: Batch((1,) * size, 0, context_lens=(context,) * size) for size in sizes}
    table = replace(table, host=_leave_out_host(table.host))
    planner = Planner(program, table, shapes=[*decodes.values()])
    whole = replace(config, split="nano", micro_batches=1, probation=False)
    choices: dict[int, SplitChoice | Decline] = {}
    for size, batch in decodes.items():
        planner.memory.forget_decisions()  # each size by its own prediction
        choice = planner.choose(batch, whole)
        if isinstance(choice, SplitChoice) and not choice.prediction.pays(config.margin):
            choice = decline_unpaid(choice.prediction, config)
        choices[size] = choice
    return choices


def _leave_out_host(host: HostCost) -> HostCost:
    """Return the costs of the host without those of issuing ops, but with the gain of a compiled unsplit step."""
    return HostCost(
        handover=host.handover,
        unsplit=min(host.unsplit, 0.0),
        unsplit_per_token=min(host.unsplit_per_token, 0.0),
    )
