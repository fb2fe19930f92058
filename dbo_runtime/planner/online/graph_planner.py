"""Choose the programs that vLLM captures into graphs: whether the ops of a decode overlap there, by costs.

A decode mostly runs from a graph that vLLM captured at start. A replay costs the host the same whatever ops it has, so
a graph gains as soon as the device does: one op communicates while another of the same decode computes (n = 1), which
reads no weight twice.
"""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.nano_batches import Rows
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import HostCost
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.planner.online.split_choice import SplitChoice

CONTEXT_SHARE = 0.25  # length of the context of each decode, as a share of the longest context


class GraphPlanner:
    """Chooses the program of each graph by its number of tokens, all of which are decodes.

    Nothing is learned from replays, because no step is timed. So a program has to gain more than the margin, and may
    lose nothing if costs are off.

    Args:
        program: ops of one micro-batch.
        table: costs of the ops.
        sizes: numbers of tokens of the graphs.
        limits: largest steps of the scheduler.
        rows: functions that join and cut values of nano-batches; None if these are predicted only.

    Raises:
        ConfigError: if an op has no cost.
    """

    def __init__(
        self,
        program: Program,
        table: CostTable,
        sizes: tuple[int, ...],
        limits: ServingLimits | None = None,
        rows: Rows | None = None,
    ) -> None:
        self._context = int(CONTEXT_SHARE * (limits or ServingLimits()).context)
        shapes = [self._make_decodes(size) for size in sizes]
        table = replace(table, host=_leave_out_host(table.host))
        self._planner = Planner(program, table, shapes=shapes, rows=rows)

    def prepare(self, config: RuntimeConfig) -> str:
        """Find the orders under these settings, and return a text that identifies them."""
        self._planner.prepare(_keep_whole(config))
        return self._planner.digest

    def choose(self, tokens: int, config: RuntimeConfig) -> SplitChoice | Decline:
        """Return the program of the graph of *tokens* tokens, or why the model's own forward is captured."""
        if config.mode != "auto":
            return Decline("graphs are planned only if DBO_MODE is auto")
        return self._planner.choose(self._make_decodes(tokens), _keep_whole(config))

    def _make_decodes(self, tokens: int) -> Batch:
        return Batch((1,) * tokens, 0, context_lens=(self._context,) * tokens)


def _keep_whole(config: RuntimeConfig) -> RuntimeConfig:
    """Return the settings without micro-batches, which need attention metadata of their own, and without trials.

    If the settings ask for micro-batches, the graph holds the order alone, which cuts nothing.
    """
    return replace(config, split="nano", micro_batches=1 if config.split == "micro" else None, probation=False)


def _leave_out_host(host: HostCost) -> HostCost:
    """Return the costs of the host without those of issuing ops, but with the gain of a compiled unsplit step."""
    return HostCost(
        handover=host.handover,
        unsplit=min(host.unsplit, 0.0),
        unsplit_per_token=min(host.unsplit_per_token, 0.0),
    )
