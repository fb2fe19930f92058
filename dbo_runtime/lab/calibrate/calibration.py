"""A calibration on all ranks: measure a served model's ops, fit their costs, and plan by them."""

from __future__ import annotations

import datetime
import sys
import time
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.calibrate.contention import fit_contention
from dbo_runtime.lab.calibrate.divided_costs import add_joint_costs
from dbo_runtime.lab.calibrate.fit import fit_costs
from dbo_runtime.lab.calibrate.measurement import Measurements, measure
from dbo_runtime.lab.calibrate.report import BUDGET_SECONDS, Report
from dbo_runtime.lab.calibrate.samples import keep_queued
from dbo_runtime.lab.calibrate.step_fit import fit_steps
from dbo_runtime.planner.costs.cost_file import format_costs, parse_costs
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import HostCost
from dbo_runtime.planner.costs.program_spec import describe_program
from dbo_runtime.vllm_plugin.install.cost_source import CostSource
from dbo_runtime.vllm_plugin.parallel.agreement import gather


def calibrate(source: CostSource, path: str, budget: float | None, terminal: str) -> dict[str, Any]:
    """Measure the ops of a source's model and plan by their costs; see `CostSource.calibrate`. Collective.

    Returns:
        The fields of a `Report`.

    Raises:
        DeclineError, ConfigError: raised on all ranks if ops cannot be measured, or their durations make no sense.
    """
    budget = BUDGET_SECONDS if budget is None else budget
    group, start = source.rank.groups.all_ranks, time.perf_counter()
    with _ProgressBar(group.rank_in_group > 0, terminal) as bar:
        measurements = measure(source.runner, source.forward, group, budget, bar.show)
    table, errors = _fit(source, measurements, budget)
    source.use(table, "calibration")
    if path and group.rank_in_group == 0:
        source.save(table, path)
    report = Report(
        seconds=time.perf_counter() - start,
        digest=table.digest,
        op_errors=dict(table.errors),
        step_errors=errors,
        split_error=table.split_error,
        contention=dict(table.contention),
        largest=max(sum(load.tokens for load in step.loads) for step in measurements.steps),
        left_out=len(measurements.left_out),
        stage=source.rank.stage.name,
    )
    return asdict(report)


def _fit(source: CostSource, measurements: Measurements, budget: float) -> tuple[CostTable, dict[str, float]]:
    """Return the costs that the first rank has fitted, and their errors by mode, on all ranks.

    One rank fits for all: the last digits of a fit may differ between hosts, and then decisions could differ.
    """
    group = source.rank.groups.all_ranks
    first = gather(group, _try_to_fit(source, measurements) if group.rank_in_group == 0 else None)[0]
    assert first is not None, "rank 0 fits"
    text, errors, problem = first
    if problem and measurements.left_out:
        more = len(measurements.left_out)
        raise ConfigError(f"{problem} {budget:g} s were too short for {more} more sizes of batches: allow more.")
    if problem:
        raise ConfigError(problem)
    return parse_costs(text), errors


def _try_to_fit(source: CostSource, measurements: Measurements) -> tuple[str, dict[str, float], str]:
    """Return the costs as the text of a file, their errors, and what went wrong."""
    try:
        table, errors = _fit_table(source, measurements)
        return format_costs(table), errors, ""
    except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
        return "", {}, str(error) if isinstance(error, ConfigError) else f"the costs cannot be fitted: {error!r}"


def _fit_table(source: CostSource, measurements: Measurements) -> tuple[CostTable, dict[str, float]]:
    """Return the costs, and their relative errors for steps, by mode.

    Raises:
        ConfigError: the durations make no sense.
    """
    program, identity = source.forward.runtime.program, source.identity
    host_computes = source.rank.platform.host_computes
    # If the host computes, it is never late: lanes run what the host runs.
    samples = measurements.samples if host_computes else keep_queued(measurements.samples)
    costs, errors = fit_costs(samples, identity.bytes_per_token)
    origin = Provenance(
        kind="measured",
        source="dbo calibrate",
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        machine=identity.machine,
        model=identity.model,
        parallel=identity.parallel,
        versions=identity.versions,
    )
    host = HostCost(computes=host_computes)
    contention = fit_contention(costs, samples)
    table = CostTable(origin, describe_program(program), add_joint_costs(costs, program), contention, host, errors)
    return fit_steps(table, program, measurements.steps)


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
