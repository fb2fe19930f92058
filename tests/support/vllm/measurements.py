"""What a calibration has measured when nothing is missing."""

from __future__ import annotations

from collections import Counter

from dbo_runtime.lab.calibrate.measurement import Measurements
from dbo_runtime.lab.calibrate.shapes import MAX_REPEATS
from tests.support.vllm.costs import FEW_SHAPES

IN_TURNS = {shape.measure_parts(shape.cuts[0]) for shape in FEW_SHAPES}
MODES = ("unsplit", "sequential", "alternate")
ALONE = {shape.measure_parts(cut) for shape in FEW_SHAPES for cut in shape.cuts}


def assert_complete(found: Measurements, ops: Counter[str]) -> None:
    """Assert that there are runs of all ops and steps, and of each op some alone at every load."""
    expected = Counter(dict.fromkeys(MODES, len(FEW_SHAPES) * MAX_REPEATS))
    assert Counter(step.mode for step in found.steps) == expected
    loads = {mode: {step.loads for step in found.steps if step.mode == mode} for mode in MODES}
    assert loads == {
        "unsplit": {(s.measure_features(),) for s in FEW_SHAPES},
        "sequential": ALONE,
        "alternate": IN_TURNS,
    }
    assert all(step.seconds > step.idle >= 0 for step in found.steps)
    assert all(step.idle == 0 for step in found.steps if step.mode == "unsplit")
    assert {sample.op for sample in found.samples} == set(ops)
    parts = {part for loads in ALONE for part in loads}
    for op in ops:
        assert {sample.features for sample in found.samples if sample.op == op and sample.concurrent == 0} == parts
    assert all(0 <= sample.concurrent <= sample.seconds for sample in found.samples)
