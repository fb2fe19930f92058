"""Methods for vLLM's workers, reached over its own RPC.

Pass `worker_extension_cls="dbo_runtime.vllm_plugin.extension.WorkerExtension"` to `LLM(...)`, then call
`llm.collective_rpc("dbo_statistics")`. It works with the plugin off, too: there is nothing to tell then.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import Any

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import read_environment
from dbo_runtime.errors import SplitError


class WorkerExtension:
    """Mixed into the worker class by vLLM."""

    model_runner: Any

    def dbo_statistics(self) -> dict[str, Any] | None:
        """Return the counts of split and declined steps, or None where the model is not split at all."""
        forward = self._dbo_forward()
        return None if forward is None else forward.runtime.statistics.as_dict()

    def dbo_request_timeline(self) -> None:
        """Keep the timeline of the next step that is split, and forget the last one."""
        forward = self._dbo_forward()
        if forward is not None:
            forward.timeline, forward.wants_timeline = None, True

    def dbo_timeline(self) -> list[tuple[str, str, int, float, float]] | None:
        """Return the spans of the timeline that was asked for, or None if no step was split since."""
        forward = self._dbo_forward()
        if forward is None or forward.timeline is None:
            return None
        return [tuple(span) for span in forward.timeline.spans]

    def dbo_cut_at(self, cuts: list[int] | None) -> None:
        """Cut every step at these token offsets (those that it can be cut at), whatever the settings say.

        None returns to the settings. For tests and experiments.
        """
        forward = self._dbo_forward()
        if forward is not None:
            forward.choose_cuts = None if cuts is None else partial(_keep_possible, cuts)

    def dbo_configure(self, settings: dict[str, str]) -> None:
        """Read the settings again from the environment with these on top, such as {"DBO_MODE": "off"}.

        In force from the next step on. For tests and measurements.
        """
        forward = self._dbo_forward()
        if forward is not None:
            forward.runtime.config = read_environment({**os.environ, **settings})

    def _dbo_forward(self) -> Any:
        from dbo_runtime.vllm_plugin.forward import SplitForward

        forward = self.model_runner.get_model().forward
        return forward if isinstance(forward, SplitForward) else None


def _keep_possible(cuts: list[int], batch: Batch) -> list[int]:
    possible: list[int] = []
    for cut in cuts:
        with suppress(SplitError):
            slice_batch(batch, [*possible, cut])
            possible.append(cut)
    return possible
