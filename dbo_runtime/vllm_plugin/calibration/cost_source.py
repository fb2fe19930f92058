"""The source of a model's costs: a file or a calibration. All ranks use the same costs, or none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ConfigError, DboError
from dbo_runtime.planner.costs.cost_file import format_costs, load_costs, name_stage_file, parse_costs, save_costs
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import are_alike, describe_program
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.vllm_plugin.calibration.identity import Identity
from dbo_runtime.vllm_plugin.calibration.report import BUDGET_SECONDS, Report
from dbo_runtime.vllm_plugin.parallel.agreement import format_ranks, gather
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class CostSource:
    """Gives a model's runtime a planner, on all ranks or on none. All methods are collective over all ranks.

    Each pipeline stage has its own costs and files, because its layers are different.

    Args:
        runner: vLLM's model runner.
        forward: the model's forward.
        identity: the conditions that costs must match.
        rank: the context of this rank.
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
        self._runner = runner
        self._forward = forward
        self._identity = identity
        self._group = rank.groups.all_ranks
        self._host_computes = rank.platform.host_computes
        self._log = rank.log
        self._stage = rank.stage.name
        self._metrics = metrics
        scheduler = rank.vllm_config.scheduler_config
        self._limits = ServingLimits(
            tokens=scheduler.max_num_batched_tokens,
            requests=scheduler.max_num_seqs,
            context=rank.vllm_config.model_config.max_model_len,
        )

    @property
    def _runtime(self) -> MicroBatchRuntime:
        return self._forward.runtime

    def prepare(self, config: RuntimeConfig) -> None:
        """Calibrate or load, according to the settings. After any error, serve by the thresholds."""
        try:
            if config.calibrate:
                self.calibrate(config.costs)
            elif config.costs:
                self.load(config.costs)
        except DboError as error:
            self._log.warning("no costs to plan with; DBO_MODE=auto goes by the thresholds", reason=str(error))

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
        self._use(table, path)

    def calibrate(self, path: str = "", budget: float = BUDGET_SECONDS, terminal: str = "") -> Report:
        """Measure the model's own ops, plan by their costs, and write the costs to *path* if given.

        If the file cannot be written, log a warning and use the costs anyway. Progress is shown on *terminal*, the path
        of one, or on standard error if that is a terminal.

        Raises:
            DeclineError, ConfigError: raised on all ranks if ops cannot be measured, or their durations make no sense.
        """
        unmeasured = self._forward.decider.no_micro
        if unmeasured is not None:  # ops are measured in micro-batches
            raise ConfigError(
                f"the costs of a model in nano-batches only cannot be measured ({unmeasured}): set DBO_COSTS to a file "
                "measured without that, or serve by the thresholds."
            )
        # Import late: most servers load a file, or plan without costs.
        from dbo_runtime.vllm_plugin.calibration.fitting import fit_table
        from dbo_runtime.vllm_plugin.calibration.measurement import measure

        start, program = time.perf_counter(), self._runtime.program
        with _ProgressBar(self._group.rank_in_group > 0, terminal) as bar:
            measurements = measure(self._runner, self._forward, self._group, budget, bar.show)
        # One rank fits for all: the last digits of a fit may differ between hosts, and then decisions could differ.
        fit = partial(fit_table, measurements, program, self._identity, self._host_computes)
        first = gather(self._group, self._try(fit) if self._group.rank_in_group == 0 else None)[0]
        assert first is not None, "rank 0 fits"
        text, errors, problem = first
        if problem and measurements.left_out:
            more = len(measurements.left_out)
            raise ConfigError(f"{problem} {budget:g} s were too short for {more} more sizes of batches: allow more.")
        if problem:
            raise ConfigError(problem)
        table = parse_costs(text)
        self._use(table, "calibration")
        if path and self._group.rank_in_group == 0:
            self._save(table, name_stage_file(path, self._stage))
        op_errors, contention = dict(table.errors), dict(table.contention)
        seconds = time.perf_counter() - start
        largest = max(sum(load.tokens for load in step.loads) for step in measurements.steps)
        return Report(
            seconds,
            table.digest,
            op_errors,
            errors,
            table.split_error,
            contention,
            largest,
            len(measurements.left_out),
            self._stage,
        )

    def _try(self, fit: Callable[[], tuple[CostTable, dict[str, float]]]) -> tuple[str, dict[str, float], str]:
        """Return the costs as the text of a file, their errors, and what went wrong."""
        try:
            table, errors = fit()
            return format_costs(table), errors, ""
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
            return "", {}, str(error) if isinstance(error, ConfigError) else f"the costs cannot be fitted: {error!r}"

    def _save(self, table: CostTable, path: str) -> None:
        try:
            save_costs(table, path)
        except ConfigError as error:
            self._log.warning("the costs are in use, but not saved", reason=str(error))

    def _read(self, path: str) -> CostTable:
        table = load_costs(path)
        identity = self._identity
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

    def _use(self, table: CostTable, source: str) -> None:
        """Plan by *table* from now on, with all orders prepared for the limits of the first rank's scheduler.

        Raises:
            ConfigError: raised on all ranks if any of them cannot prepare, or they prepared different orders. The
                previous planner stays in use.
        """
        runtime, before, start = self._runtime, self._runtime.planner, time.perf_counter()
        limits = ServingLimits(
            **gather(self._group, asdict(self._limits))[0]
        )  # vLLM's defaults differ without a server
        prepared, problem = "", ""
        try:
            runtime.planner = planner = Planner(
                runtime.program, table, limits, keeps_layers=runtime.keeps_layers, rows=runtime.rows
            )
            runtime.prepare(runtime.config)
            prepared = planner.digest
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome; memory may be short
            problem = f"issue orders cannot be prepared: {error!r}"
        outcomes = gather(self._group, [prepared, problem])
        problem = next((problem for _, problem in outcomes if problem), "")
        if not problem and len({prepared for prepared, _ in outcomes}) > 1:
            problem = f"ranks prepared different issue orders. {format_ranks([prepared for prepared, _ in outcomes])}"
        if problem:
            runtime.planner = before
            raise ConfigError(problem)
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


class _ProgressBar:
    """A progress bar on the first rank's terminal, if there is one."""

    def __init__(self, quiet: bool, terminal: str) -> None:
        self._own = open(terminal, "w") if terminal and not quiet else None  # noqa: SIM115 - closed with the bar
        file = self._own or sys.stderr
        self._bar = tqdm(disable=quiet or None, desc="calibrating", unit="shape", file=file, leave=False)

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._own is not None:
            self._own.close()

    def show(self, done: int, of: int, what: str) -> None:
        """Show that *done* of *of* shapes are measured, and that *what* comes next."""
        self._bar.total = of
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(done - self._bar.n)
