"""Names of the counts of served steps, and functions that read them from any process of the server."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from dbo_runtime.errors import ConfigError

PREFIX = "vllm:dbo_"
KINDS = ("counter", "histogram")  # kinds of files that are summed over engines
FOLDER = "_DBO_RUNTIME_COUNTS"  # set only by this package, for a server's child processes
LABELS = ("mode", "reason", "outcome")  # labels of metrics; each metric has at most one
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # set by vLLM if it has several API servers

Outcome = Literal["unsplit", "error"]
"""The outcome of a step that ranks disagreed on: it ran unsplit on all ranks, or ended the engine."""

MAX_FILE_BYTES = 1 << 24  # an engine's counts take about 4 KiB
_REMEDY = "Remove it: the engine that it belongs to has ended, or is counted no more."

HELP: Mapping[str, str] = MappingProxyType(
    {
        "steps": "Steps by mode: split, unsplit, or concurrent (unsplit, with ops on a second compute lane).",
        "encoder_forwards": "Forwards of a vision encoder by mode: split or unsplit.",
        "declines": "Steps that were not split, by reason.",
        "standing_declines": "Engines of which no further step is split or counted, by reason.",
        "disagreements": "Steps about which ranks disagreed, by outcome: unsplit (one had a reason), or error.",
        "costs_known": "Whether steps are planned by measured costs (1) or go by the thresholds (0).",
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
    """Return the folder of this server's counts; None if nothing is counted.

    A folder made by this package is in a place that all users may write to, so it must belong to this user alone. A
    folder that vLLM shares is the operator's choice, and is not checked.

    Raises:
        ConfigError: other users own the folder, or may write to it.
    """
    shared, own = os.environ.get(SHARED), os.environ.get(FOLDER)
    if not shared and own:
        _check_owner(own)
    return shared or own


def _check_owner(folder: str) -> None:
    try:
        status = os.lstat(folder)
    except (OSError, ValueError):
        return  # the folder is gone, and nothing is counted any more
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(f"{FOLDER}={folder!r} is no folder of this user alone; unset it, and start the server again.")


def statistics() -> dict[str, Any]:
    """Return the counts of all engines on this host, from any process of the server.

    `split`, `unsplit`, `concurrent`: numbers of steps; `micro_batches`, and `tokens`: their total tokens; `declined`:
    steps by reason; `standing_declines`: engines that count no further steps, by reason; `disagreements`: steps that
    ranks disagreed on, by outcome (`unsplit`, `error`); `encoder_forwards`: forwards of a vision encoder by mode
    (`split`, `unsplit`); `planning_seconds`: total of all steps; `predicted_seconds`, `measured_seconds`: by mode, for
    steps with a prediction; `communication_seconds`, `hidden_seconds`: for the `sampled` split steps, one in 64. All
    are zero if overlap is off.
    """
    folder = get_folder()
    values_by_name: dict[str, dict[str, float]] = {}
    for file in [] if folder is None else _list_files(Path(folder)):
        for name, label, value in _read(file):
            values = values_by_name.setdefault(name, {})
            values[label] = values.get(label, 0.0) + value
    return _sum_up(values_by_name)


def _list_files(folder: Path) -> list[Path]:
    return [file for kind in KINDS for file in sorted(folder.glob(f"{kind}_dbo*.db"))]


def _read(file: Path) -> list[tuple[str, str, float]]:
    """Return the name, the label value (mode, reason or outcome) if any, and the number of each count in a file."""
    from prometheus_client.multiprocess import MultiProcessCollector

    _check_file(file)
    try:
        samples = [sample for metric in MultiProcessCollector.merge([str(file)]) for sample in metric.samples]
        return [
            (
                sample.name.removeprefix(PREFIX).removesuffix("_total"),
                next((sample.labels[label] for label in LABELS if label in sample.labels), ""),
                _check_value(sample.value),
            )
            for sample in samples
            if "le" not in sample.labels
        ]
    except FileNotFoundError:
        return []  # the engine has just ended and removed its file
    except Exception as error:  # noqa: BLE001 - prometheus_client may raise anything for a file that is not its own
        raise ConfigError(f"counts in {file} cannot be read ({error!r:.200}). {_REMEDY}") from None


def _check_file(file: Path) -> None:
    """Raise ConfigError if `prometheus_client` could not read the file quickly."""
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"counts in {file} cannot be read ({error.strerror}). {_REMEDY}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"counts in {file} cannot be read: it is no file of at most {MAX_FILE_BYTES} bytes. {_REMEDY}"
        )


def _check_value(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a count is {value}")
    return value


def _sum_up(counts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    def count(name: str, label: str = "") -> int:
        return round(counts.get(name, {}).get(label, 0))

    def get_seconds(name: str) -> float:
        return counts.get(name, {}).get("", 0.0)

    return {
        "split": count("steps", "split"),
        "nano": count("steps", "nano"),
        "unsplit": count("steps", "unsplit"),
        "concurrent": count("steps", "concurrent"),
        "encoder_forwards": {mode: count("encoder_forwards", mode) for mode in ("split", "unsplit")},
        "micro_batches": count("micro_batches"),
        "tokens": count("micro_batch_tokens_sum"),
        "declined": {reason: round(number) for reason, number in counts.get("declines", {}).items()},
        "standing_declines": {reason: round(number) for reason, number in counts.get("standing_declines", {}).items()},
        "disagreements": {outcome: count("disagreements", outcome) for outcome in get_args(Outcome)},
        "planning_seconds": get_seconds("planning_seconds_sum"),
        "predicted_seconds": dict(counts.get("predicted_seconds", {})),
        "measured_seconds": dict(counts.get("measured_seconds", {})),
        "sampled": count("sampled_steps"),
        "communication_seconds": get_seconds("communication_seconds"),
        "hidden_seconds": get_seconds("hidden_seconds"),
    }
