"""Count served steps on vLLM's own Prometheus endpoint, whichever process serves it.

Workers and API servers are separate processes. Counts therefore pass through files that prometheus_client maps into
memory and merges: in its multi-process folder if vLLM has several API servers, otherwise in a folder of this package.
Counts of a rank on another host than the API server stay on that host.
"""

from __future__ import annotations

import atexit
import errno
import math
import multiprocessing
import os
import shutil
import tempfile
import uuid
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan, Mode
from dbo_runtime.observe.counts import FOLDER, HELP, KINDS, PREFIX, SHARED, Outcome
from dbo_runtime.observe.logs import open_log
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.vllm_plugin.telemetry.count_file import CountFile

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LAST = "gauge_mostrecent"  # kind of file whose values replace each other
CHECKED_STEPS = 64  # number of steps between checks that the files still exist
_LOST = "counts of steps do not reach /metrics"
_REMEDY = "make room, or set TMPDIR to a folder with room that nothing cleans up, and restart"

HISTOGRAMS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        # Same bounds as vLLM's `iteration_tokens_total`.
        "micro_batch_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, math.inf),
        # From the time of a cached decision to that of a step.
        "planning_seconds": (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1, 1, math.inf),
    }
)
"""The upper bounds of each histogram's buckets, inclusive."""

_LABELS = MappingProxyType({bound: str(float(bound)) for bounds in HISTOGRAMS.values() for bound in bounds})


def open_folder() -> None:
    """Make the folder in which this process and its child processes share counts; serve them from its registry.

    If the folder cannot be made, log why; nothing is counted.
    """
    if os.environ.get(SHARED) or _belongs_here(os.environ.get(FOLDER, "")):
        return
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    try:
        folder = tempfile.mkdtemp(prefix=_name(os.getpid()))
    except OSError as error:
        _warn_of_loss(open_log(), tempfile.gettempdir(), error)
        return
    os.environ[FOLDER] = folder
    atexit.register(_remove, folder, os.getpid())
    MultiProcessCollector(REGISTRY, path=folder)


def _belongs_here(folder: str) -> bool:
    """Return whether this process made the folder, or a parent that started it with multiprocessing, as vLLM does.

    Other processes inherit the variable, too, such as a server started from a process that runs an engine.
    """
    return Path(folder).name.startswith(_name(os.getpid())) or bool(folder and multiprocessing.parent_process())


def _name(owner: int) -> str:
    return f"dbo_runtime-{owner}-"


def _remove(folder: str, owner: int) -> None:
    """Remove the folder when the process that made it ends, not when a process forked from it does."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _warn_of_loss(log: FilteringBoundLogger, path: str | Path, error: OSError) -> None:
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    log.error(_LOST, path=str(path), errno=name, reason=error.strerror, remedy=_REMEDY)


class Metrics:
    """The counts of one engine. Values are in the folder's files as soon as they are counted.

    If files cannot be written, or are removed, this is logged once, and counting goes on.

    Args:
        folder: folder of the files; see `open_folder`.
        model: the name under which vLLM serves the model.
        engine: vLLM's index of the engine, which is the data parallel rank.
        log: the rank's logger.
        asks_costs: whether the settings name costs to plan by, or request a calibration.
    """

    def __init__(
        self,
        folder: str | Path,
        model: str,
        engine: int,
        log: FilteringBoundLogger | None = None,
        asks_costs: bool = False,
    ) -> None:
        self._folder = Path(folder)
        self._log = log or open_log()
        self._labels = {"model_name": model, "engine": str(engine)}
        self._counted = 0
        self._has_warned = False
        owner = uuid.uuid4().hex  # one process may have several engines
        self._files = {kind: CountFile(self._folder / f"{kind}_dbo{owner}.db") for kind in (*KINDS, LAST)}
        self._asks_costs = asks_costs
        self._entries: dict[tuple[str, str, str], tuple[CountFile, str]] = {}
        for mode in get_args(Mode):
            self._add("steps", 0, "mode", mode)
        for outcome in get_args(Outcome):
            self._add("disagreements", 0, "outcome", outcome)
        for name, bounds in HISTOGRAMS.items():
            for bound in bounds:
                self._put("histogram", name, "_bucket", 0, "le", _LABELS[bound])
            self._put("histogram", name, "_sum", 0)  # `LLM.get_metrics()` asserts that buckets have a sum
        self.show_costs(False)

    def count_step(self, plan: ExecutionPlan | Decline) -> None:
        """Count a step by its mode, and by its reason if it was declined."""
        self._counted += 1
        if self._counted % CHECKED_STEPS == 0 and not all(file.exists() for file in self._files.values()):
            self._warn(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        if isinstance(plan, Decline):
            self._add("steps", 1, "mode", "unsplit")
            self._add("declines", 1, "reason", plan.reason)
            return
        self._add("steps", 1, "mode", plan.mode)
        if plan.mode != "split":
            return
        self._add("micro_batches", len(plan.slices))
        for piece in plan.slices:
            self._observe("micro_batch_tokens", piece.size)

    def count_planning(self, seconds: float) -> None:
        """Count the seconds that a step, split or not, waited for its decision."""
        self._observe("planning_seconds", seconds)

    def count_standing(self, decline: Decline) -> None:
        """Count a reason why no further step is split. Those steps are not counted one by one."""
        self._add("standing_declines", 1, "reason", decline.reason)

    def count_disagreement(self, outcome: Outcome) -> None:
        """Count a step that ranks disagreed on."""
        self._add("disagreements", 1, "outcome", outcome)

    def show_costs(self, are_known: bool) -> None:
        """Record whether steps are planned by measured costs."""
        asked = "yes" if self._asks_costs else "no"
        try:
            self._files[LAST].put(self._make_key("costs_known", "", "asked", asked), float(are_known))
        except OSError as error:
            self._warn(error)

    def count_encoder(self, plan: ExecutionPlan | Decline) -> None:
        """Count a forward of the vision encoder by its mode."""
        self._add("encoder_forwards", 1, "mode", "unsplit" if isinstance(plan, Decline) else "split")

    def count_time(self, mode: str, expected: float, seconds: float) -> None:
        """Add the predicted and the measured seconds of a step (`unsplit` or `split`)."""
        self._add("predicted_seconds", expected, "mode", mode)
        self._add("measured_seconds", seconds, "mode", mode)

    def add_sample(self, timeline: Timeline) -> None:
        """Add a split step that was recorded op by op."""
        communication, hidden = timeline.measure_hidden()
        self._add("sampled_steps", 1)
        self._add("communication_seconds", communication)
        self._add("hidden_seconds", hidden)

    def _add(self, name: str, amount: float, label: str = "", value: str = "") -> None:
        self._put("counter", name, "_total", amount, label, value)

    def _observe(self, name: str, value: float) -> None:
        """Add *value* to one bucket of a histogram. prometheus_client accumulates buckets when it reads."""
        bounds = HISTOGRAMS[name]
        self._put("histogram", name, "_bucket", 1, "le", _LABELS[bounds[bisect_left(bounds, value)]])
        self._put("histogram", name, "_sum", value)

    def _put(self, kind: str, name: str, suffix: str, amount: float, label: str = "", value: str = "") -> None:
        """Add *amount* to the count *name*, under the value *value* of *label* if it has one."""
        entry = self._entries.get((name, suffix, value))
        if entry is None:  # cached, because making a key takes longer than counting
            key = self._make_key(name, suffix, label, value)
            entry = self._entries[name, suffix, value] = self._files[kind], key
        try:
            entry[0].add(entry[1], amount)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn_of_loss(self._log, self._folder, error)

    def _make_key(self, name: str, suffix: str, label: str, value: str) -> str:
        """Return the key in prometheus_client's format."""
        from prometheus_client.mmap_dict import mmap_key

        labels = {**self._labels, **({label: value} if label else {})}
        return mmap_key(PREFIX + name, PREFIX + name + suffix, list(labels), list(labels.values()), HELP[name])
