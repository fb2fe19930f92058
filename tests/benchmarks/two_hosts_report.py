"""What was measured over two hosts, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from examples.two_nodes import PARALLEL
from tests.benchmarks.measured_hosts import DEFAULT_FAMILY, describe_model
from tests.benchmarks.targets import Target
from tests.benchmarks.two_hosts_cells import NANO, NO_LIMIT, OFF, PLANNED, SYNCHRONOUS, Cell
from tests.support.page import make_table

TARGET_RATE, TARGET_PARALLEL, ENOUGH = "200mbit", "tensor", 7  # runs for a verdict
TARGETS = {"1x2000": (1.30, 1.15, 0.90), "4x500": (1.15, 1.12, 0.90)}  # over off, over synchronous, own bound / T
SHOWN = (OFF, NANO, PLANNED)
HEADER = ("link", "workload", *(f"{mode}, s" for mode in SHOWN), "planned in", "over unsplit")
EVIDENCE = ("link", "workload", "over no overlap", "predicted", "hidden", "own bound / T", "of nano-batches")
REMARKS = """\
Seconds are medians of the whole `generate`. *Nano-batches* splits every step so (`DBO_SPLIT=nano`), in the number that
costs predict to be best; *planned* is `DBO_MODE=auto` with costs that were measured at this rate before: it decides
whether to split, into how many micro-batches or nano-batches (*planned in*), where, and in which order. The ratio is
that of medians, with the quartiles of the ratios within a turn in parentheses.""".splitlines()
REMARKS_ON_EVIDENCE = """\
*over no overlap* compares planned steps with steps in two micro-batches that run one after the other. *predicted* is
what the costs say of the best split, compared with unsplit; it is taken only where that holds even if they are off.
*hidden* is the share of communication that ran during computation. *own bound* is the least time that any issue order
could take for ops that take what they took in that very step, *T* the forward's time; *of nano-batches* is the same in
the steps that were split so.""".splitlines()


def write_report(cells: Sequence[Cell], repeat: int, dispatch: str, family: str = DEFAULT_FAMILY) -> list[str]:
    """Return a section's lines of markdown, for one kind of parallelism."""
    (parallel,) = {cell.parallel for cell in cells}
    name = PARALLEL[parallel].format(dispatch=dispatch)
    shares = "together" if parallel == "tensor" else "each with prompts of its own"
    return [
        f"{name} over two hosts, {shares}. {describe_model(family)};",
        f"a core for each host; medians of {repeat} interleaved runs after one to warm up.",
        "",
        *make_table(HEADER, [make_row(cell) for cell in cells]),
        "",
        *REMARKS,
        describe_tokens(cells),
        *describe_joint(cells),
        "",
        *make_table(EVIDENCE, [row for cell in cells if (row := make_evidence(cell))]),
        "",
        *REMARKS_ON_EVIDENCE,
        "",
        *(write_targets(cells, repeat) if family == DEFAULT_FAMILY else ()),
    ]


def make_row(cell: Cell) -> list[str]:
    """Return the cells of a row: what was gained."""
    seconds = (f"{cell.median(mode):.3f}" if mode in cell.seconds else "–" for mode in SHOWN)
    return [describe_rate(cell), cell.workload, *seconds, cell.parts, describe_gain(cell, OFF)]


def make_evidence(cell: Cell) -> list[str]:
    """Return the cells of a row: what was predicted, and how well it was overlapped; nothing if none of it is known."""
    shares = (cell.hidden, cell.order_efficiency(), cell.order_efficiency(NANO))
    figures = [
        "–" if cell.predicted is None else f"{cell.predicted:.2f}x",
        *("–" if share is None else f"{share:.2f}" for share in shares),
    ]
    if set(figures) == {"–"}:
        return []
    return [describe_rate(cell), cell.workload, f"{cell.gain(SYNCHRONOUS):.2f}x", *figures]


def describe_rate(cell: Cell) -> str:
    """Return the link's rate, as the tables have it."""
    return "no limit" if cell.rate == NO_LIMIT else cell.rate


def describe_tokens(cells: Sequence[Cell]) -> str:
    """Say whether all modes gave the same tokens."""
    different = ", ".join(f"{cell.workload} at {cell.rate}" for cell in cells if not cell.same)
    return f"**Modes gave DIFFERENT tokens**: {different}." if different else "All modes gave the same tokens."


def describe_joint(cells: Sequence[Cell]) -> list[str]:
    """Say how much of the computation nano-batches leave whole, by workload; nothing if that is not known."""
    shares: dict[str, list[float]] = {}
    for cell in cells:
        if cell.joint is not None:
            shares.setdefault(cell.workload, []).append(cell.joint)
    if not shares:
        return []
    words = ", ".join(f"{workload} {median(found):.0%}" for workload, found in shares.items())
    return [f"Computation in joint ops, which nano-batches leave whole: {words}."]


def describe_gain(cell: Cell, over: str) -> str:
    """Return a ratio with its spread."""
    low, high = cell.spread(over)
    return f"{cell.gain(over):.2f}x ({low:.2f}–{high:.2f})"


def write_targets(cells: Sequence[Cell], repeat: int) -> list[str]:
    """Return the table of targets, or why there is none."""
    asked = f"{TARGET_RATE}, {PARALLEL[TARGET_PARALLEL]}"
    targets = find_targets(cells)
    if not targets:
        return [f"Targets are set for {' and '.join(TARGETS)} at {asked}; these were not measured."]
    if repeat < ENOUGH:
        return [f"Targets (at {asked}) are judged by medians of {ENOUGH} runs or more; these are of {repeat}."]
    return [f"Targets, at {asked}:", "", *make_table(("", "asked", "measured", ""), [t.row() for t in targets])]


def find_targets(cells: Sequence[Cell]) -> list[Target]:
    """Return what is asked of these, as far as they were measured."""
    targets = []
    for cell in cells:
        if (cell.parallel, cell.rate) != (TARGET_PARALLEL, TARGET_RATE) or cell.workload not in TARGETS:
            continue
        over_off, over_synchronous, efficiency = TARGETS[cell.workload]
        targets += [
            Target(f"{cell.workload}: over {OFF}", over_off, cell.gain(OFF)),
            Target(f"{cell.workload}: over {SYNCHRONOUS}", over_synchronous, cell.gain(SYNCHRONOUS)),
            Target(f"{cell.workload}: own bound / T", efficiency, cell.order_efficiency()),
        ]
    return targets
