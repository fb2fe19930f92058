"""What steps take beside their ops, and how far predictions of them are off: from measured steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from statistics import median

import numpy as np

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.policies import sequential
from dbo_runtime.program import Program
from dbo_runtime.schedule import lower
from dbo_runtime.vllm_plugin.calibration.measurement import StepSample

UPPER = 0.75  # the quartile of errors that decisions reckon with

_Predicted = tuple[StepSample, float]  # and its predicted seconds


def fit_steps(table: CostTable, program: Program, steps: list[StepSample]) -> tuple[CostTable, dict[str, float]]:
    """Return *table* with what steps take beside their ops, and the median relative errors of the steps with it.

    Micro-batches one after the other leave all lanes idle only while one hands over to another. What then remains of
    measured steps, when the predicted is taken off, is a constant and something for each token (the embedding, which
    is no op of the program, is reduced, too). How split steps compare with whole ones after all that, nothing explains:
    it is what decisions have to reckon with.
    """
    in_turn = lower((program,) * 2, sequential((program,) * 2))
    handovers = sum(bool(step.waits) for step in in_turn.instructions)
    idle = [step.idle for step in steps if step.way == "sequential"]
    handover = max(median(idle), 0.0) / handovers if idle and handovers else 0.0
    table = replace(table, host=replace(table.host, handover=handover))
    whole, split = _predict(Planner(program, table), steps)
    (whole_fixed, whole_per_token), (split_fixed, split_per_token) = fit_rest(whole), fit_rest(split)
    host = replace(
        table.host,
        unsplit=whole_fixed,
        unsplit_per_token=whole_per_token,
        split=split_fixed,
        split_per_token=split_per_token,
    )
    errors = {"whole": _find_error(whole, *fit_rest(whole)), "split": _find_error(split, *fit_rest(split))}
    table = replace(table, host=host)
    return replace(table, split_error=compute_split_error(*_predict(Planner(program, table), steps))), errors


def compute_split_error(whole: list[_Predicted], split: list[_Predicted]) -> float:
    """Return by which share split steps took longer than predicted, next to the whole step of the same turn [turns].

    Upper quartile, because what is in doubt speaks against splitting. A step counts by the time that it takes: that is
    what a wrong decision costs, and short steps scatter most.
    """
    errors = sorted(
        ((split_step.seconds / whole_step.seconds) * (whole_seconds / split_seconds) - 1, whole_step.seconds)
        for (whole_step, whole_seconds), (split_step, split_seconds) in zip(whole, split, strict=True)
        if split_seconds  # what costs nothing by a prediction says nothing of it
    )
    if not errors:
        return 0.0
    until = np.cumsum([seconds for _, seconds in errors])
    error, _ = errors[int(np.searchsorted(until, UPPER * until[-1]))]
    return max(error, 0.0)


def fit_rest(predicted: list[_Predicted]) -> tuple[float, float]:
    """Return the seconds, and the seconds a token, that predictions lack: least squares of relative errors.

    Of repeats the median counts. Steps of one size only tell no more than a constant.
    """
    points = [
        (sum(load.tokens for load in loads), seconds, median(step.seconds for step, _ in group))
        for (loads, seconds), runs in groupby(sorted(predicted, key=_identify), key=_identify)
        for group in [list(runs)]
    ]
    if not points:
        return 0.0, 0.0
    tokens, seconds, measured = np.array(points).T
    columns = [np.ones(len(points)), tokens] if len(set(tokens.tolist())) > 1 else [np.ones(len(points))]
    found, *_ = np.linalg.lstsq(
        np.stack(columns, axis=1) / measured[:, None], (measured - seconds) / measured, rcond=None
    )
    fixed, *per_token = (float(value) for value in found)
    return fixed, per_token[0] if per_token else 0.0


def _predict(planner: Planner, steps: list[StepSample]) -> tuple[list[_Predicted], list[_Predicted]]:
    """Return the whole steps, and those split in turns, with what is predicted of them."""
    config = RuntimeConfig(policy=("alternate", 0), side="on")  # as they were measured
    whole = [(step, planner.predict_unsplit(step.loads[0])) for step in steps if step.way == "whole"]
    return whole, [(step, planner.predict_split(step.loads, config)) for step in steps if step.way == "alternate"]


def _identify(predicted: _Predicted) -> tuple[tuple[BatchFeatures, ...], float]:
    step, seconds = predicted
    return step.loads, seconds


def _find_error(predicted: list[_Predicted], fixed: float, per_token: float) -> float:
    errors = [
        abs(seconds + fixed + per_token * sum(load.tokens for load in step.loads) - step.seconds) / step.seconds
        for step, seconds in predicted
    ]
    return median(errors) if errors else 0.0
