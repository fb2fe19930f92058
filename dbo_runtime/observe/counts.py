"""Names of the counts of served steps, and how to read them from any process of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

PREFIX = "vllm:dbo_"
FOLDER = "_DBO_RUNTIME_COUNTS"  # set by this package only, for the processes that a server starts
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM if it has several API servers

HELP: Mapping[str, str] = MappingProxyType(
    {
        "steps": "Steps by mode: split, unsplit, or concurrent (unsplit, with ops on a second compute lane).",
        "encoder_forwards": "Forwards of a vision encoder by mode: split or unsplit.",
        "declines": "Steps that were not split, by reason.",
        "micro_batches": "Micro-batches of split steps.",
        "micro_batch_tokens": "Tokens in a micro-batch.",
        "planning_seconds": "Seconds that a step waited on the host for its decision, the agreement of ranks included.",
        "predicted_seconds": "Predicted seconds of the steps with a prediction.",
        "measured_seconds": "Measured seconds of the steps in predicted_seconds.",
        "sampled_steps": "Split steps that were recorded op by op, one in 64.",
        "communication_seconds": "Seconds of communication in the sampled steps.",
        "hidden_seconds": "Seconds of communication in the sampled steps that overlapped computation.",
    }
)


def get_folder() -> str | None:
    """Return the folder of this server's counts; None if nothing is counted."""
    return os.environ.get(SHARED) or os.environ.get(FOLDER)


def statistics() -> dict[str, Any]:
    """Return the counts of all engines on this host, from any process of the server.

    `split`, `unsplit` and `concurrent` steps; `micro_batches`, and their `tokens` in total; `declined`: steps by
    reason; `encoder_forwards` of a vision encoder by mode (`split`, `unsplit`); `planning_seconds` of all steps, in
    total; `predicted_seconds` and `measured_seconds` by mode, of the steps with a prediction; `communication_seconds`
    and `hidden_seconds` of the `sampled` split steps, one in 64. All zero where overlap is off.
    """
    folder = get_folder()
    files = [] if folder is None else sorted(map(str, Path(folder).glob("*_dbo*.db")))
    return _sum_up(_read(files))


def _read(files: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return values by name and, if there is one, by `mode` or `reason`, summed over engines."""
    if not files:
        return {}
    from prometheus_client.multiprocess import MultiProcessCollector

    values_by_name: dict[str, dict[str, float]] = {}
    for metric in MultiProcessCollector.merge(files):
        for sample in metric.samples:
            if "le" not in sample.labels:
                label = sample.labels.get("mode") or sample.labels.get("reason") or ""
                values = values_by_name.setdefault(sample.name.removeprefix(PREFIX).removesuffix("_total"), {})
                values[label] = values.get(label, 0.0) + sample.value
    return values_by_name


def _sum_up(counts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    def count(name: str, label: str = "") -> int:
        return round(counts.get(name, {}).get(label, 0))

    def get_seconds(name: str) -> float:
        return counts.get(name, {}).get("", 0.0)

    return {
        "split": count("steps", "split"),
        "unsplit": count("steps", "unsplit"),
        "concurrent": count("steps", "concurrent"),
        "encoder_forwards": {mode: count("encoder_forwards", mode) for mode in ("split", "unsplit")},
        "micro_batches": count("micro_batches"),
        "tokens": count("micro_batch_tokens_sum"),
        "declined": {reason: round(number) for reason, number in counts.get("declines", {}).items()},
        "planning_seconds": get_seconds("planning_seconds_sum"),
        "predicted_seconds": dict(counts.get("predicted_seconds", {})),
        "measured_seconds": dict(counts.get("measured_seconds", {})),
        "sampled": count("sampled_steps"),
        "communication_seconds": get_seconds("communication_seconds"),
        "hidden_seconds": get_seconds("hidden_seconds"),
    }
