"""A worker extension that plants faults into a served model, and takes them away again."""

from __future__ import annotations

from typing import Any

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.extension import WorkerExtension
from tests.support.reliability.adapter_faults import ADAPTER_FAULTS
from tests.support.reliability.metadata_faults import METADATA_FAULTS

EXTENSION = "tests.support.reliability.worker_extension.Extension"


class Extension(WorkerExtension):
    """Like the one that it extends."""

    def plant(self, name: str | None) -> None:
        """Let steps from now on have the fault of this name; None returns to what is right."""
        forward = self._dbo_forward()
        assert forward is not None
        runtime, splitter = forward.runtime, forward.decider.splitter
        program, split = vars(splitter).setdefault("_right", (runtime.program, splitter.split))
        runtime.program = program
        for fault in ADAPTER_FAULTS:
            if fault.__name__ == name:
                runtime.program = fault(runtime.program)
        for change in METADATA_FAULTS:
            if change.__name__ == name:
                split = change_contexts(split, change)
        vars(splitter)["split"] = split
        runtime._executors.clear()
        runtime._sanitized.clear()


def change_contexts(split: Any, change: Any) -> Any:
    """Return a `ContextSplitter.split` that changes what it returns for micro-batches."""

    def split_and_change(*args: Any, **kwargs: Any) -> Any:
        contexts = split(*args, **kwargs)
        return contexts if isinstance(contexts, Decline) or len(contexts) < 2 else change(contexts)

    return split_and_change
