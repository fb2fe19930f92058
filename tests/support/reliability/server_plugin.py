"""A plugin of vLLM's that lets a test plant faults into ops: the processes of a faulty server load it.

An order is a file in the folder `FAULTS`: on which rank and lane, and what the next op there does. With overlap on,
that is an op of a split step. The op renames the file, to the id of its process, before it obeys.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "RELIABILITY_FAULTS"  # the variable with the folder
HOLDS_SECONDS = 30.0  # at most
TOO_MUCH_BYTES = 1 << 50
ENTRY_POINTS = "[vllm.general_plugins]\nplanted = tests.support.reliability.server_plugin:register\n"


class Order(NamedTuple):
    """What an op is to do: `raise` an error, `allocate` more memory than there is, or `hold` until it may go on."""

    act: str
    lane: str
    rank: int


def plant(folder: Path) -> str:
    """Write the metadata of an installed package with this plugin; return the folder, for PYTHONPATH."""
    package = folder / "planted-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    return str(folder)


def register() -> None:
    """Wrap the start of vLLM's workers, whose ops are wrapped before a model is loaded."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if FOLDER not in os.environ or hasattr(original, "_planted"):
        return

    @functools.wraps(original)
    def init_device(self: Any) -> None:
        original(self)
        _wrap_ops(Planted(Path(os.environ[FOLDER])))

    init_device._planted = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device


class Planted:
    """Looks for orders to this rank."""

    def __init__(self, folder: Path) -> None:
        import torch.distributed as dist

        self._folder = folder
        self._rank = dist.get_rank()
        self.is_step = False

    def obey(self, lane: str) -> None:
        """Do what an order to this lane says, once."""
        file = self._folder / f"{self._rank}-{lane}"
        if not (self.is_step and file.exists()):
            return
        order = Order(*json.loads(file.read_text()))
        os.rename(file, self._folder / f"reached-{os.getpid()}")
        if order.act == "raise":
            raise RuntimeError(f"a planted error on {lane}")
        if order.act == "allocate":
            import torch

            torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)
        deadline = time.monotonic() + HOLDS_SECONDS
        while not (self._folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def _wrap_ops(planted: Planted) -> None:
    """Wrap attention, all-reduces, and what says that a step is split: where dbo_runtime is off, every step counts."""
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention

    from dbo_runtime.setting_sources import is_enabled

    wrap = functools.partial(_obey_before, planted)
    DeepseekV2MLAAttention.forward = wrap("compute", DeepseekV2MLAAttention.forward)
    if not is_enabled(os.environ) or os.environ.get("DBO_MODE") == "off":
        planted.is_step = True
        GroupCoordinator.all_reduce = wrap("comm", GroupCoordinator.all_reduce)
        return
    from dbo_runtime.engine.runtime import MicroBatchRuntime
    from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives

    ModelCollectives.all_reduce = wrap("comm", ModelCollectives.all_reduce)  # type: ignore[method-assign]
    MicroBatchRuntime.run = _mark_step(planted, MicroBatchRuntime.run)  # type: ignore[method-assign]


def _obey_before(planted: Planted, lane: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def obey_and_run(*args: Any, **kwargs: Any) -> Any:
        planted.obey(lane)
        return run(*args, **kwargs)

    return obey_and_run


def _mark_step(planted: Planted, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_marked(*args: Any, **kwargs: Any) -> Any:
        planted.is_step = True
        try:
            return run(*args, **kwargs)
        finally:
            planted.is_step = False

    return run_marked
