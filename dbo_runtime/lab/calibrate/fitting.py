"""Costs of a model, fitted to what was measured."""

from __future__ import annotations

import datetime

from dbo_runtime.ir.program import Program
from dbo_runtime.lab.calibrate.contention import fit_contention
from dbo_runtime.lab.calibrate.fit import fit_costs
from dbo_runtime.lab.calibrate.measurement import Measurements
from dbo_runtime.lab.calibrate.samples import keep_queued
from dbo_runtime.lab.calibrate.step_fit import fit_steps
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import HostCost
from dbo_runtime.planner.costs.program_spec import describe_program
from dbo_runtime.vllm_plugin.install.cost_identity import Identity


def fit_table(
    measurements: Measurements, program: Program, identity: Identity, host_computes: bool
) -> tuple[CostTable, dict[str, float]]:
    """Return the costs, and their relative errors for steps, by mode.

    Raises:
        ConfigError: the durations make no sense.
    """
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
    table = CostTable(origin, describe_program(program), costs, contention, host, errors)
    return fit_steps(table, program, measurements.steps)
