"""The source of a model's costs: a file or a calibration. All ranks use the same costs, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ConfigError, DboError
from dbo_runtime.planner.costs.cost_file import load_costs, name_stage_file, save_costs
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import are_alike, describe_program
from dbo_runtime.planner.online.graph_planner import choose_graphs
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.vllm_plugin.install.cost_identity import Identity
from dbo_runtime.vllm_plugin.parallel.agreement import format_ranks, gather
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class CostSource:
    """Gives a model's runtime a planner, on all ranks or on none. All methods but `save` are collective.

    Each pipeline stage has its own costs and files, because its layers are different.

    Attributes:
        runner: vLLM's model runner.
        forward: the model's forward.
        identity: the conditions that costs must match.
        rank: the context of this rank.
        is_early: whether costs were loaded before vLLM captured graphs.

    Args:
        metrics: counts, which show that costs are known; None on ranks that do not count.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        forward: SplitForward,
        identity: Identity,
        rank: RankContext,
        metrics: Metrics | None = None,
    ) -> None:
        self.runner = runner
        self.forward = forward
        self.identity = identity
        self.rank = rank
        self._group = rank.groups.all_ranks
        self._log = rank.log
        self._stage = rank.stage.name
        self._metrics = metrics
        self.is_early = False
        scheduler = rank.vllm_config.scheduler_config
        self._limits = ServingLimits(
            tokens=scheduler.max_num_batched_tokens,
            requests=scheduler.max_num_seqs,
            context=rank.vllm_config.model_config.max_model_len,
        )

    @property
    def _runtime(self) -> MicroBatchRuntime:
        return self.forward.runtime

    def prepare(self, config: RuntimeConfig) -> None:
        """Calibrate or load, according to the settings. After any error, serve by the thresholds."""
        try:
            if config.calibrate:
                self.calibrate(config.costs)
            elif config.costs:
                self.load(config.costs)
        except DboError as error:
            self._log.warning("no costs to plan with; DBO_MODE=auto goes by the thresholds", reason=str(error))

    def prepare_graphs(self, config: RuntimeConfig) -> None:
        """Load the costs that are in a file before vLLM captures graphs, because they choose the captured programs.

        Costs that are still to be measured come too late for that.
        """
        compilation = self.rank.vllm_config.compilation_config
        captures = compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs()
        is_compared = bool(config.check) or self.forward.decider.first_steps is not None
        if not captures or is_compared or config.calibrate or not config.costs or config.mode != "auto":
            return
        self.prepare(config)
        self.is_early = True
        if self._runtime.planner is None:
            return
        sizes = sorted({*(compilation.cudagraph_capture_sizes or ())})
        try:
            self._prepare_alike(partial(self._choose_graphs, self._runtime.planner.table, sizes, self._gather_limits()))
        except ConfigError as error:
            self.forward.decider.warm_up.graphs = {}
            self._log.warning("vLLM's graphs hold the model's own forward", reason=str(error))

    def load(self, path: str) -> None:
        """Plan by the costs in a file that every rank reads.

        Raises:
            ConfigError: raised on all ranks if any of them cannot use its file, or the files differ.
        """
        path = name_stage_file(path, self._stage)
        table: CostTable | None = None
        try:
            table = self._read(path)
            outcome = f"costs {table.digest}"
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            outcome = str(error) if isinstance(error, ConfigError) else f"cost file {path} cannot be used: {error!r}"
        gathered = gather(self._group, (outcome, table is not None))
        outcomes = [text for text, _ in gathered]
        if not all(fits for _, fits in gathered):
            raise ConfigError(next(text for text, fits in gathered if not fits))
        if len(set(outcomes)) > 1:
            raise ConfigError(f"{path} differs between ranks; copy one to all hosts. {format_ranks(outcomes)}")
        assert table is not None
        self.use(table, path)

    def calibrate(self, path: str = "", budget: float | None = None, terminal: str = "") -> dict[str, Any]:
        """Measure the model's own ops, plan by their costs, and write the costs to *path* if given.

        If the file cannot be written, log a warning and use the costs anyway. Progress is shown on *terminal*, the path
        of one, or on standard error if that is a terminal. What measures is part of the laboratory, so it is imported
        only when it is asked for.

        Args:
            path: path of a cost file.
            budget: approximate seconds to take; None means as many as at a server's start.
            terminal: path of the terminal to show progress on.

        Returns:
            The fields of a `dbo_runtime.lab.calibrate.report.Report`.

        Raises:
            DeclineError, ConfigError: raised on all ranks if ops cannot be measured, or their durations make no sense.
        """
        unmeasured = self.forward.decider.no_micro
        if unmeasured is not None:  # ops are measured in micro-batches
            raise ConfigError(
                f"the costs of a model in nano-batches only cannot be measured ({unmeasured}): set DBO_COSTS to a file "
                "measured without that, or serve by the thresholds."
            )
        laboratory = import_module("dbo_runtime.lab.calibrate.calibration")
        return cast("dict[str, Any]", laboratory.calibrate(self, path, budget, terminal))

    def save(self, table: CostTable, path: str) -> None:
        """Write costs to the file of this stage. If it cannot be written, log a warning."""
        try:
            save_costs(table, name_stage_file(path, self._stage))
        except ConfigError as error:
            self._log.warning("the costs are in use, but not saved", reason=str(error))

    def _read(self, path: str) -> CostTable:
        table = load_costs(path)
        identity = self.identity
        try:
            table.check_fits(identity.machine, identity.model, identity.parallel)
        except ConfigError as error:
            raise ConfigError(f"cost file {path}: {error}") from None
        if not are_alike(table.program, describe_program(self._runtime.program)):
            raise ConfigError(
                f"cost file {path}: it belongs to another program than the adapter records now; calibrate again: "
                "`dbo calibrate`."
            )
        if table.provenance.versions != identity.versions:
            self._log.warning(
                "costs were measured with other versions",
                then=dict(table.provenance.versions),
                now=dict(identity.versions),
            )
        return table

    def use(self, table: CostTable, source: str) -> None:
        """Plan by *table* from now on, with all orders prepared for the limits of the first rank's scheduler.

        Raises:
            ConfigError: raised on all ranks if any of them cannot prepare, or they prepared different orders. The
                previous planner stays in use.
        """
        runtime, before, start = self._runtime, self._runtime.planner, time.perf_counter()
        limits = self._gather_limits()
        try:
            self._prepare_alike(lambda: self._prepare_planner(table, limits))
        except ConfigError:
            runtime.planner = before
            raise
        if self._metrics is not None:
            self._metrics.show_costs(True)
        self._log.info(
            "planning by costs",
            source=source,
            kind=table.provenance.kind,
            date=table.provenance.date,
            digest=table.digest,
            worst_fit=f"{max(table.errors.values(), default=0.0):.1%}",
            split_error=f"{table.split_error:.1%}",
            seconds=f"{time.perf_counter() - start:.1f}",
        )

    def _prepare_planner(self, table: CostTable, limits: ServingLimits) -> str:
        """Give the runtime a planner, and return a text that identifies its orders."""
        runtime = self._runtime
        runtime.planner = planner = Planner(
            runtime.program, table, limits, keeps_layers=runtime.keeps_layers, rows=runtime.rows
        )
        runtime.prepare(runtime.config)
        return planner.digest

    def _choose_graphs(self, table: CostTable, sizes: Sequence[int], limits: ServingLimits) -> str:
        """Choose the program of each graph, and make its executor. Return a text that identifies the choices."""
        runtime = self._runtime
        graphs = self.forward.decider.warm_up.graphs = choose_graphs(
            runtime.program, table, sizes, limits, runtime.config
        )
        digests: dict[int, str] = {}
        for size, choice in graphs.items():
            plan = choice if isinstance(choice, Decline) else runtime.plan(Batch((size,), 0), (), choice)
            if not isinstance(plan, Decline):
                digests[size] = plan.digest
        return str(digests)

    def _gather_limits(self) -> ServingLimits:
        """Return the limits of the first rank's scheduler. vLLM's defaults differ without a server."""
        return ServingLimits(**gather(self._group, asdict(self._limits))[0])

    def _prepare_alike(self, prepare: Callable[[], str]) -> None:
        """Prepare issue orders on all ranks. *prepare* returns a text that identifies them. Collective.

        Raises:
            ConfigError: raised on all ranks if any of them cannot prepare, or they prepared different orders.
        """
        prepared, problem = "", ""
        try:
            prepared = prepare()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome; memory may be short
            problem = f"issue orders cannot be prepared: {error!r}"
        outcomes = gather(self._group, [prepared, problem])
        problem = next((problem for _, problem in outcomes if problem), "")
        if not problem and len({prepared for prepared, _ in outcomes}) > 1:
            problem = f"ranks prepared different issue orders. {format_ranks([prepared for prepared, _ in outcomes])}"
        if problem:
            raise ConfigError(problem)
