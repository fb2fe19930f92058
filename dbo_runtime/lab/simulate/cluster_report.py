"""The output of `dbo simulate`: requests per second at a service level, unsplit and with overlap."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from dbo_runtime.lab.simulate.comparison import Comparison, Scenario
from dbo_runtime.lab.simulate.service_level import Capacity
from dbo_runtime.lab.whatif.formatting import align
from dbo_runtime.lab.whatif.ranges import Range

HEAD = "", "requests/s", "TTFT s", "TPOT ms"


def describe_comparison(name: str, chips: str, scenario: Scenario, comparison: Comparison) -> str:
    """Return the comparison as text. Figures are medians over the seeds, with the range."""
    level, layout, workload = scenario.level, scenario.layout, scenario.workload
    seeds = len(comparison.trials)
    quantile = f"P{level.quantile * 100:g}"
    limits = [f"{quantile} TTFT {level.ttft:g} s"] + [f"TPOT {level.tpot * 1e3:g} ms"] * (workload.output > 1)
    lines = [
        f"{name} on {chips}: {layout.ranks} data parallel rank{'s' * (layout.ranks > 1)}, {layout.budget} tokens a "
        f"step, {layout.sequences} sequences",
        f"requests: {workload.prompt:g} tokens in, {workload.output:g} out, {workload.context} in the KV cache before; "
        f"Poisson, log-normal with spread {workload.spread:g}",
        f"service level: {', '.join(limits)}; {scenario.requests} requests, {seeds} seed{'s' * (seeds > 1)}",
        "",
        align([HEAD, *_list_capacities(comparison)]),
        "",
        f"gain: {_describe_gain(comparison.gain)}",
    ]
    return "\n".join(lines)


def list_comparison(name: str, scenario: Scenario, comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as data. A range is low, median and high over the seeds."""
    gain = comparison.gain
    return {
        "case": name,
        "ranks": scenario.layout.ranks,
        "requests_per_second": {"unsplit": list(comparison.unsplit), "overlapped": list(comparison.overlapped)},
        "gain": None if gain is None else list(gain),
        "seeds": [
            {
                mode: {"rate": found.rate, "ttft": found.verdict.ttft, "tpot": found.verdict.tpot}
                for mode, found in (("unsplit", trial.unsplit), ("overlapped", trial.overlapped))
            }
            for trial in comparison.trials
        ],
    }


def _list_capacities(comparison: Comparison) -> list[tuple[str, ...]]:
    modes = (
        ("unsplit", comparison.unsplit, [trial.unsplit for trial in comparison.trials]),
        ("auto", comparison.overlapped, [trial.overlapped for trial in comparison.trials]),
    )
    return [(name, _describe_rate(rate), *_describe_verdicts(found)) for name, rate, found in modes]


def _describe_rate(rate: Range) -> str:
    return rate.format(2) if rate.high else "none"


def _describe_verdicts(found: Sequence[Capacity]) -> tuple[str, str]:
    ttft, tpot = (median(values) for values in zip(*(each.verdict[:2] for each in found), strict=True))
    return f"{ttft:.2f}", f"{tpot * 1e3:.1f}"


def _describe_gain(gain: Range | None) -> str:
    if gain is None:
        return "unsplit, not even a lone request is served within the level"
    return gain.format(2, "x")
