"""Does `dbo calibrate` measure there, are steps predicted well, and does `auto` then choose the faster way?"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from .engine import Engine, get_work, keep
from .findings import Findings, run_part

BUDGET_SECONDS = {"cuda": 20.0, "cpu": 8.0}
STEPS: dict[str, tuple[tuple[int, ...], ...]] = {
    "cuda": ((8000,), (2000,) * 4, (1000,) * 8, (2000,), (500, 500), (200, 100)),
    "cpu": ((800,), (200,) * 4, (60, 40)),
}
REPEAT = 5
WAYS = {"unsplit": {"DBO_MODE": "off"}, "split": {"DBO_MODE": "always", "DBO_POLICY": "optimal"}}
AUTO = {"DBO_MODE": "auto", "DBO_POLICY": "optimal", "DBO_PROBATION": "0"}
CLOSE = 0.03  # a choice is as good as the other one if their times differ by less


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Calibrate with a model, then compare predicted with measured steps."""
    (model,) = words
    engine = Engine(model, device)
    findings.note("engine", engine.describe())
    path = get_work("costs") / "costs.json"
    (report,) = engine.llm.collective_rpc("dbo_calibrate", args=(str(path), BUDGET_SECONDS[device]))
    findings.note("calibration", report)
    keep(path, f"costs-{model}.json")
    for lengths in STEPS[device]:
        findings.attempt(f"{len(lengths)}x{lengths[0]}", partial(compare_step, engine, lengths))
    found = [step for step in findings.found.values() if isinstance(step, dict) and "right" in step]
    findings.note("right choices", f"{sum(step['right'] for step in found)} of {len(found)}")


def compare_step(engine: Engine, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return predicted and measured times of a step, split and unsplit, and what `auto` does with it."""
    predicted = engine.llm.collective_rpc("dbo_predict", args=(list(lengths),))[0]
    measured = {way: measure(engine, lengths, settings) for way, settings in WAYS.items()}
    chosen, _ = run_steps(engine, lengths, AUTO)
    seconds = {way: statistics.median(times) for way, times in measured.items()}
    faster = min(seconds, key=seconds.__getitem__)
    is_close = abs(seconds["split"] / seconds["unsplit"] - 1) < CLOSE
    found: dict[str, Any] = {"measured ms": {way: round(each * 1e3, 3) for way, each in seconds.items()}}
    if predicted is not None:
        found["predicted ms"] = {way: round(predicted[way] * 1e3, 3) for way in WAYS}
        found["error"] = {way: round(predicted[way] / seconds[way] - 1, 3) for way in WAYS}
    return {**found, "auto": chosen, "faster": faster, "right": bool(chosen == faster or is_close)}


def measure(engine: Engine, lengths: tuple[int, ...], settings: dict[str, str]) -> list[float]:
    """Return the seconds of such steps, as vLLM's worker has measured them."""
    return run_steps(engine, lengths, settings)[1]


def run_steps(engine: Engine, lengths: tuple[int, ...], settings: dict[str, str]) -> tuple[str, list[float]]:
    """Run some steps; return how the last one ran, and the seconds of those that ran like it.

    A device is behind its host: what is read after a step may be the time of the one before.
    """
    engine.configure(settings)
    last = []
    for _ in range(REPEAT + 2):
        engine.prefill(lengths)
        last.append(engine.llm.collective_rpc("dbo_last_step")[0])
    mode: str = last[-1]["mode"]
    return mode, [step["seconds"] for step in last[2:] if step["mode"] == mode]


if __name__ == "__main__":
    run_part(run)
