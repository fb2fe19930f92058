"""Fit the time of steps beyond that of their ops, and the errors of predicted steps, from measured steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from statistics import median

import numpy as np

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.calibrate.measurement import StepSample
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.predictor import Predictor

UPPER_QUARTILE = 0.75  # the quantile of errors that decisions take into account

_Predicted = tuple[StepSample, float]  # a step and its predicted seconds


def fit_steps(table: CostTable, program: Program, steps: list[StepSample]) -> tuple[CostTable, dict[str, float]]:
    """Return *table* with the time of steps beyond that of their ops, and the median relative errors by mode.

    Between sequential micro-batches, all lanes are idle only while control passes to the next one, or while the host is
    late. The remaining difference of measured and predicted steps is a constant plus an amount per token (the
    embedding, which is no op of the program, is also reduced). The remaining error of split relative to unsplit steps
    is unexplained; decisions take it into account.
    """
    in_turn = lower((program,) * 2, sequential((program,) * 2))
    handovers = sum(bool(step.waits) for step in in_turn.instructions)
    host = table.host
    idle = [step.idle - (0.0 if host.computes else step.late) for step in steps if step.mode == "sequential"]
    handover = max(median(idle), 0.0) / handovers if idle and handovers else 0.0
    host = replace(host, handover=handover)
    if not host.computes:
        issue, unsplit_issue = (
            find_issue(step for step in steps if (step.mode == "unsplit") is is_unsplit) for is_unsplit in (False, True)
        )
        host = replace(host, issue=issue, unsplit_issue=unsplit_issue)
    table = replace(table, host=host)
    unsplit, split = _predict(program, table, steps)
    (unsplit_fixed, unsplit_per_token), (split_fixed, split_per_token) = fit_rest(unsplit), fit_rest(split)
    host = replace(
        host,
        unsplit=unsplit_fixed,
        unsplit_per_token=unsplit_per_token,
        split=split_fixed,
        split_per_token=split_per_token,
    )
    errors = {
        "unsplit": _compute_error(unsplit, *fit_rest(unsplit)),
        "split": _compute_error(split, *fit_rest(split)),
    }
    table = replace(table, host=host)
    return replace(table, split_error=compute_split_error(*_predict(program, table, steps))), errors


def find_issue(steps: Iterable[StepSample]) -> float:
    """Return the host's seconds per op, for the batch where they are lowest; 0 without any steps.

    Repeats count by their median. With large batches queues fill, and the host waits for the lanes.
    """
    by_loads = sorted(steps, key=lambda step: step.loads)
    repeats = groupby(by_loads, key=lambda step: step.loads)
    return min((median(step.issue for step in alike) for _, alike in repeats), default=0.0)


def compute_split_error(unsplit: list[_Predicted], split: list[_Predicted]) -> float:
    """Return the share by which split steps took longer than predicted, relative to the same turn's unsplit step.

    This is the upper quartile over turns, because uncertainty counts against splitting. A step is weighted by its time:
    that is the cost of a wrong decision, and short steps scatter most.
    """
    errors = sorted(
        ((split_step.seconds / unsplit_step.seconds) * (unsplit_seconds / split_seconds) - 1, unsplit_step.seconds)
        for (unsplit_step, unsplit_seconds), (split_step, split_seconds) in zip(unsplit, split, strict=True)
        if split_seconds  # a prediction of 0 has no relative error
    )
    if not errors:
        return 0.0
    until = np.cumsum([seconds for _, seconds in errors])
    error, _ = errors[int(np.searchsorted(until, UPPER_QUARTILE * until[-1]))]
    return max(error, 0.0)


def fit_rest(predicted: list[_Predicted]) -> tuple[float, float]:
    """Return the seconds, and the seconds per token, that predictions lack: least squares of relative errors.

    Repeats count by their median. If all steps have one size, only a constant is fitted.
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
    solution, *_ = np.linalg.lstsq(
        np.stack(columns, axis=1) / measured[:, None], (measured - seconds) / measured, rcond=None
    )
    fixed, *per_token = (float(value) for value in solution)
    return fixed, per_token[0] if per_token else 0.0


def _predict(program: Program, table: CostTable, steps: list[StepSample]) -> tuple[list[_Predicted], list[_Predicted]]:
    """Return the unsplit steps, and those split in alternation, with their predicted seconds.

    Ops are on the lanes on which they were measured: those that the program names, `side` included.
    """
    predictor, candidates = Predictor(program, table), Candidates(program, max_states=0)
    unsplit = [(step, predictor.predict_unsplit(step.loads[0])) for step in steps if step.mode == "unsplit"]
    alternating = [step for step in steps if step.mode == "alternate"]
    counts = {len(step.loads) for step in alternating}
    orders = {count: candidates.make_policy("alternate", 0, count) for count in counts}
    return unsplit, [(step, predictor.predict_split(orders[len(step.loads)], step.loads)) for step in alternating]


def _identify(predicted: _Predicted) -> tuple[tuple[BatchFeatures, ...], float]:
    step, seconds = predicted
    return step.loads, seconds


def _compute_error(predicted: list[_Predicted], fixed: float, per_token: float) -> float:
    errors = [
        abs(seconds + fixed + per_token * sum(load.tokens for load in step.loads) - step.seconds) / step.seconds
        for step, seconds in predicted
    ]
    return median(errors) if errors else 0.0
