"""What is counted of served steps, and how to read it from any process of the server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

PREFIX = "vllm:dbo_"
FOLDER = "_DBO_RUNTIME_COUNTS"  # set by us for the processes that a server starts, and by nobody else
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM if it has several API servers

HELP: Mapping[str, str] = MappingProxyType(
    {
        "steps": "Steps that ran split, whole, or whole with ops of them beside each other.",
        "encoder_forwards": "Forwards of a vision encoder that ran split or whole.",
        "declines": "Steps that ran whole, by reason.",
        "micro_batches": "Micro-batches of split steps.",
        "micro_batch_tokens": "Tokens in a micro-batch.",
        "predicted_seconds": "What steps were predicted to take, of those that were.",
        "measured_seconds": "What the steps in predicted_seconds took.",
        "sampled_steps": "Split steps that were recorded op by op, one in 64.",
        "communication_seconds": "Communication in the sampled steps.",
        "hidden_seconds": "Communication in the sampled steps beside which computation ran.",
    }
)


def get_folder() -> str | None:
    """Return where this server's counts are; None where nobody counts."""
    return os.environ.get(SHARED) or os.environ.get(FOLDER)


def statistics() -> dict[str, Any]:
    """Return what became of all steps so far, of all engines on this host, from any process of the server.

    `split` and `whole` steps; `micro_batches`, and their `tokens` in total; `declined`: steps by reason;
    `encoder_forwards` by way (`split`, `whole`), of a vision encoder; `predicted_seconds` and `measured_seconds` by
    way, of the steps that were predicted; `communication_seconds` and `hidden_seconds` of the `sampled` split steps,
    one in 64. All zero where overlap is off.
    """
    folder = get_folder()
    files = [] if folder is None else sorted(map(str, Path(folder).glob("*_dbo*.db")))
    return _sum_up(_read(files))


def _read(files: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return values by name and, if there is one, by `way` or `reason`, summed over engines."""
    if not files:
        return {}
    from prometheus_client.multiprocess import MultiProcessCollector

    found: dict[str, dict[str, float]] = {}
    for metric in MultiProcessCollector.merge(files):
        for sample in metric.samples:
            if "le" not in sample.labels:
                label = sample.labels.get("way") or sample.labels.get("reason") or ""
                values = found.setdefault(sample.name.removeprefix(PREFIX).removesuffix("_total"), {})
                values[label] = values.get(label, 0.0) + sample.value
    return found


def _sum_up(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    def count(name: str, label: str = "") -> int:
        return round(found.get(name, {}).get(label, 0))

    def sum_seconds(name: str) -> float:
        return found.get(name, {}).get("", 0.0)

    return {
        "split": count("steps", "split"),
        "whole": count("steps", "whole"),
        "beside": count("steps", "beside"),
        "encoder_forwards": {way: count("encoder_forwards", way) for way in ("split", "whole")},
        "micro_batches": count("micro_batches"),
        "tokens": count("micro_batch_tokens_sum"),
        "declined": {reason: round(number) for reason, number in found.get("declines", {}).items()},
        "predicted_seconds": dict(found.get("predicted_seconds", {})),
        "measured_seconds": dict(found.get("measured_seconds", {})),
        "sampled": count("sampled_steps"),
        "communication_seconds": sum_seconds("communication_seconds"),
        "hidden_seconds": sum_seconds("hidden_seconds"),
    }
