"""What came of an architecture, and the table of all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.registry.trial import are_equal
from tests.support.page import make_table

ADAPTER, GENERIC, DECLINED, BREAKS, NOT_RUN = "adapter", "without adapter", "declined", "breaks", "not run by vLLM"
MEANINGS: Mapping[str, str] = {
    ADAPTER: "overlap, by the registered adapter of the architecture or of its backbone",
    GENERIC: "overlap with `DBO_GENERIC=1`; without, unsplit, because no adapter is registered",
    DECLINED: "unsplit with `DBO_GENERIC=1`, too, for the reason given",
    BREAKS: "fails, or answers otherwise, where vLLM by itself does not",
    NOT_RUN: "vLLM's CPU build by itself does not run the tiny model: it lacks a kernel, or the config lacks what the "
    "family needs; the reason is given",
}


class Outcome(NamedTuple):
    """What came of an architecture.

    Attributes:
        what: one of `MEANINGS`.
        steps: how many steps were split, and equal to the unsplit ones.
        why: a reason, an error, or the name of an adapter.
    """

    what: str
    steps: int = 0
    why: str = ""


def judge(tried: Mapping[str, Mapping[str, Any]]) -> Outcome:
    """Return what the trials of an architecture come to."""
    overlap, without, alone = (tried.get(side, {}) for side in ("overlap", "no adapter", "vLLM alone"))
    if "error" in alone:
        return Outcome(NOT_RUN, why=find_error(alone))
    failed = next((trial for trial in (overlap, without) if "error" in trial), None)
    if failed is not None:
        return Outcome(BREAKS, why=find_error(failed))
    if len({*overlap["steps"]}) != 1:
        return Outcome(BREAKS, why="the ranks have split different numbers of steps")
    steps = overlap["steps"][0]
    references = [trial for trial in (overlap.get("unsplit answers"), without.get("answers")) if trial]
    if not all(are_equal(overlap["answers"], reference) for reference in references):
        return Outcome(BREAKS, steps, "answers differ")
    if not steps:
        return Outcome(DECLINED, why=find_decline(overlap))
    return Outcome(ADAPTER, steps, overlap["adapter"]) if overlap["adapter"] else Outcome(GENERIC, steps)


def find_decline(trial: Mapping[str, Any]) -> str:
    """Return why no step of a trial was split, as its log says it."""
    found = re.findall(
        r"(?:every step runs unsplit|step not split)\s+reason=(.*?)(?:\s\s+|$)(?:detail=(.*?)(?:\s\s+|$))?",
        trial["log"],
        re.M,
    )
    if not found:
        return "no step was split"
    reason, detail = found[0]
    return shorten(f"{reason} ({detail})" if detail else reason)


def find_error(trial: Mapping[str, Any]) -> str:
    """Return why a trial failed: where it is a worker's error, vLLM's own says only where to look."""
    error = trial["error"]
    if "See stack trace" in error or "failed with error ''" in error:
        causes = re.findall(r"(?:^|\] )([A-Za-z_.]*(?:Error|Exception)(?:: .*)?)$", trial["log"], re.M)
        error = next((cause for cause in reversed(causes) if "stack trace" not in cause), error)
    return shorten(error)


def shorten(error: str) -> str:
    """Return an error in one line, without what is said around it and without folders."""
    line = " ".join(error.split())
    line = re.sub(r"^\w+: Worker failed with error ['\"](.*)['\"], please check .*$", r"\1", line)
    line = re.sub(r"/\S*/(\S+\.py)", r"\1", line)
    return line if len(line) <= 160 else f"{line[:160]}..."


def make_lines(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return counts of architectures, and a row for each, and for each variant of the model of one."""
    architectures = {name: outcome for name, outcome in outcomes.items() if " " not in name}
    counts = Counter(outcome.what for outcome in architectures.values())
    run = len(architectures) - counts[NOT_RUN]
    default, overlap = counts[ADAPTER], counts[ADAPTER] + counts[GENERIC]
    summary = (
        f"Of {len(architectures)} text architectures, vLLM's CPU build runs {run} as tiny models. **{default} of these "
        f"{run} overlap by default ({default / max(1, run):.0%}), {overlap} with `DBO_GENERIC=1` "
        f"({overlap / max(1, run):.0%})**; {counts[DECLINED]} are declined with a reason, {counts[BREAKS]} break."
    )
    rows = [[f"{counts[what]}", what, meaning] for what, meaning in MEANINGS.items()]
    table = make_table(["", "outcome", "what it means"], rows)
    cells = [
        [f"`{name}`", outcome.what, str(outcome.steps or ""), outcome.why] for name, outcome in sorted(outcomes.items())
    ]
    return [
        summary,
        "",
        *table,
        "",
        *make_table(["architecture", "outcome", "steps split and equal", "by, or why not"], cells),
    ]
