"""The output of the plan command for one step: figures as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.lab.whatif.formatting import align, name_split, to_ms
from dbo_runtime.lab.whatif.published_cases import PublishedCase
from dbo_runtime.lab.whatif.scale import count_layers
from dbo_runtime.lab.whatif.whatif import BreakEven, Split, WhatIf
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.cost_table import CostTable

WIDTH = 120
LAYERS_DRAWN = 3
MIN_GAP_SHOWN = 1e-4  # smaller gaps are shown as "less than this"


def tabulate_cases(cases: Sequence[PublishedCase]) -> str:
    """Return one line for each published case: its name, its step, the model, and the chips that it is spread over."""
    rows = [("case", "step of a rank", "model", "chips")]
    rows += [(case.name, _describe_load(case), _name_model(case), _count_chips(case)) for case in cases]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = "`dbo plan --list NAME` says where a case comes from; `dbo plan --costs NAME` predicts its gain."
    return "\n".join([*lines, "", more])


def describe_case(case: PublishedCase) -> str:
    """Return a published case with its kind, its step and its source."""
    source = textwrap.fill(case.table.provenance.source, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{case.name} ({case.table.provenance.kind}; {_describe_load(case)})\n{source}"


def _describe_load(case: PublishedCase) -> str:
    count = len(case.step.query_lens)
    return (
        f"{case.step.tokens} tokens in {count} prompt{'s' if count > 1 else ''}"
        if case.step.prefill_tokens
        else f"{count} decodes"
    )


def _name_model(case: PublishedCase) -> str:
    return case.table.provenance.model.get("name", "")


def _count_chips(case: PublishedCase) -> str:
    parallel = case.table.provenance.parallel
    return f"{parallel.get('tensor', 1) * parallel.get('data', 1)} x {case.table.provenance.machine.get('chip', '?')}"


def describe_whatif(name: str, table: CostTable, answer: WhatIf, break_even: BreakEven, margin: float) -> str:
    """Return the answer as text."""
    lines = [_describe_origin(name, table), "", _describe_step(table, answer), ""]
    lines.extend(_tabulate_splits(answer))
    lines.append("")
    lines.extend(f"{label:<12}{text}" for label, text in _list_findings(answer, break_even, margin))
    if answer.best:
        lines.extend(["", _draw_start(answer.best, count_layers(table))])
    return "\n".join(lines)


def list_figures(name: str, table: CostTable, answer: WhatIf, break_even: BreakEven, margin: float) -> dict[str, Any]:
    """Return the answer as data. Times are in milliseconds."""
    best = answer.best
    return {
        "costs": name,
        "kind": table.provenance.kind,
        "source": table.provenance.source,
        "digest": table.digest,
        "layers": count_layers(table),
        "tokens": answer.batch.tokens,
        "query_lens": list(answer.batch.query_lens),
        "context_lens": list(answer.batch.contexts),
        "unsplit_ms": to_ms(answer.unsplit),
        "lanes_ms": {lane: to_ms(seconds) for lane, seconds in answer.busy.items()},
        "splits": [_list_split(answer, split) for split in answer.splits],
        "best": None if best is None else len(best.sizes),
        "margin": margin,
        "split": not isinstance(answer.decision, Decline),
        "decision": _describe_decision(answer, margin),
        "break_even_tokens": break_even.tokens,
        "break_even_searched_to": break_even.searched_to,
        "break_even_exceptions": list(break_even.exceptions),
    }


def _describe_origin(name: str, table: CostTable) -> str:
    source = textwrap.fill(table.provenance.source, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return f"costs: {name}, {table.provenance.kind}, {table.provenance.date}\n{source}"


def _describe_step(table: CostTable, answer: WhatIf) -> str:
    where = [table.provenance.model.get("name", ""), f"{count_layers(table)} layers"]
    parallel = {name: number for name, number in table.provenance.parallel.items() if name != "hosts"}
    where += [f"{name}{'' if name == 'stage' else ' parallel'} {number}" for name, number in parallel.items()]
    parts = [f"{seconds * 1e3:.2f} {_name_lane(lane)}" for lane, seconds in answer.busy.items()]
    outside = answer.unsplit - sum(answer.busy.values())
    if abs(outside) > 1e-9:
        parts.append(f"{outside * 1e3:.2f} outside of ops")
    return (
        f"step: {_describe_batch(answer.batch)}; {', '.join(filter(None, where))}\n"
        f"unsplit: {answer.unsplit * 1e3:.2f} ms = {' + '.join(parts)}"
    )


def _describe_batch(batch: Batch) -> str:
    count, shortest, longest = len(batch.query_lens), min(batch.query_lens), max(batch.query_lens)
    kind = "decode" if not batch.prefill_tokens else "prompt" if shortest > 1 else "request"
    sizes = "" if longest == 1 else f" of {shortest}" if shortest == longest else f" of {shortest} to {longest}"
    cached = f" after {max(batch.contexts)} in the KV cache" if any(batch.contexts) else ""
    return f"{_count(batch.tokens, 'token')}, {_count(count, kind)}{sizes}{cached}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _name_lane(lane: str) -> str:
    return {COMPUTE: "compute", COMM: "communication"}.get(lane, lane)


def _tabulate_splits(answer: WhatIf) -> list[str]:
    if not answer.splits:
        return ["this step cannot be cut"]
    rows = [("split in", "ms", "speed-up", "bound ms", "at most", "gap", "E_overlap", "tokens")]
    for split in answer.splits:
        hidden = answer.measure_overlap(split)
        rows.append(
            (
                f"{name_split(len(split.sizes), split.side_ops)}{' *' if split is answer.best else '  '}",
                f"{split.seconds * 1e3:.2f}",
                f"{answer.speed_up(split.seconds):.3f}x",
                f"{split.bound * 1e3:.2f}",
                f"{answer.speed_up(split.bound):.3f}x",
                _describe_gap(split),
                "none" if hidden is None else f"{hidden:.1%}",
                "+".join(map(str, split.sizes)),
            )
        )
    return align(rows).split("\n")


def _describe_gap(split: Split) -> str:
    if split.is_optimal:
        return "optimal"
    return f"{split.gap:.2%}" if split.gap >= MIN_GAP_SHOWN else f"<{MIN_GAP_SHOWN:.2%}"


def _list_findings(answer: WhatIf, break_even: BreakEven, margin: float) -> list[tuple[str, str]]:
    best = answer.best
    findings = [
        ("decision:", _describe_decision(answer, margin)),
        ("break-even:", _describe_break_even(break_even, margin)),
    ]
    if best:
        proof = "no order is faster" if best.is_optimal else f"none saves more than {_describe_gap(best)} of its time"
        findings.append(("order:", f"{best.order}; with these cuts {proof}"))
    return findings


def _describe_decision(answer: WhatIf, margin: float) -> str:
    if isinstance(answer.decision, Decline):
        return f"leave unsplit: {answer.decision}"
    option = answer.decision.prediction
    how = f"split in {option.micro_batches}" if option.micro_batches > 1 and not option.side_ops else option.description
    same = ((len(split.sizes), split.side_ops) == (option.micro_batches, option.side_ops) for split in answer.splits)
    exact = (1 - split.seconds / answer.unsplit for split, is_same in zip(answer.splits, same, strict=True) if is_same)
    return f"{how}: gains {next(exact, option.gain):.1%}, more than the margin of {margin:.1%}"


def _describe_break_even(break_even: BreakEven, margin: float) -> str:
    if break_even.tokens is None:
        return f"none up to {break_even.searched_to} tokens: splitting does not pay by {margin:.1%} anywhere"
    text = f"{break_even.tokens} tokens: from there on splitting pays by {margin:.1%}, even if costs are off"
    if break_even.exceptions:
        text += f", but not at {', '.join(map(str, break_even.exceptions))}"
    return f"{text} (looked up to {break_even.searched_to})"


def _draw_start(split: Split, layers: int) -> str:
    """Draw the first layers only, because all layers in the same width would show nothing."""
    spans = split.timeline.spans
    first = [span.end for span in spans if span.micro_batch == 0 and _parse_layer(span.op) in range(LAYERS_DRAWN)]
    until = max(first or [span.end for span in spans])
    timeline = Timeline(tuple(span._replace(end=min(span.end, until)) for span in spans if span.start < until))
    shown = "all layers" if layers <= LAYERS_DRAWN else f"the first {LAYERS_DRAWN} of {layers} layers of micro-batch 0"
    return f"{shown}, {until * 1e3:.2f} ms; digits are micro-batches, dots idle\n{timeline.draw()}"


def pick_layers(timeline: Timeline, layers: int) -> tuple[Timeline, str]:
    """Return a few layers out of the middle of a step, where all are alike, with the phrase that says which.

    A figure of all layers would be a bar code. A step of few layers is returned whole.
    """
    first = (layers - LAYERS_DRAWN) // 2
    spans = tuple(span for span in timeline.spans if _parse_layer(span.op) in range(first, first + LAYERS_DRAWN))
    if layers <= LAYERS_DRAWN or not spans:
        return timeline, f"all {layers} layers"
    return Timeline(spans), f"layers {first} to {first + LAYERS_DRAWN - 1} of {layers}"


def _parse_layer(label: str) -> int | None:
    """Return an op's layer from its label, such as `L12.attention`; None outside layers."""
    layer = label.partition(".")[0]
    return int(layer[1:]) if layer[:1] == "L" and layer[1:].isdecimal() else None


def _list_split(answer: WhatIf, split: Split) -> dict[str, Any]:
    return {
        "micro_batches": len(split.sizes),
        "tokens": list(split.sizes),
        "ms": to_ms(split.seconds),
        "speed_up": answer.speed_up(split.seconds),
        "bound_ms": to_ms(split.bound),
        "best_possible_speed_up": answer.speed_up(split.bound),
        "gap": split.gap,
        "proven_optimal": split.is_optimal,
        "e_overlap": answer.measure_overlap(split),
        "order": split.order,
    }
