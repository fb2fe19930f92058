"""Methods for vLLM's workers, called over vLLM's own RPC.

Pass `worker_extension_cls="dbo_runtime.vllm_plugin.extension.WorkerExtension"` to `LLM(...)`, then call
`llm.collective_rpc("dbo_statistics")`. The methods also work with the plugin off, and then return None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.decline import Decline
from dbo_runtime.errors import SplitError
from dbo_runtime.setting_sources import reread_environment
from dbo_runtime.vllm_plugin.install.served_model import ServedModel, get_served_model

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from dbo_runtime.vllm_plugin.encoder.forward import Grid, SplitEncoder
    from dbo_runtime.vllm_plugin.step.forward import SplitForward


class WorkerExtension:
    """Mixed into the worker class by vLLM."""

    model_runner: GPUModelRunner

    def dbo_statistics(self) -> dict[str, Any] | None:
        """Return the counts of split and declined steps, or None if no step of the model is split.

        `caches` has the number of entries and the limit of each cache of plans.
        """
        forward = self._dbo_forward()
        if forward is None:
            return None
        return {**forward.runtime.statistics.as_dict(), "caches": forward.describe_caches()}

    def dbo_encoder_statistics(self) -> dict[str, Any] | None:
        """Return the counts of the vision encoder's forwards, or None if none is split."""
        encoder = self._dbo_encoder()
        return None if encoder is None else encoder.runtime.statistics.as_dict()

    def dbo_request_timeline(self) -> None:
        """Keep the timeline of the next split step. Drop the last one."""
        forward = self._dbo_forward()
        if forward is not None:
            forward.observer.recording.request()

    def dbo_timeline(self) -> dict[str, Any] | None:
        """Return the requested timeline, or None if no step was split since the request; see `Timeline.from_dict`."""
        forward = self._dbo_forward()
        timeline = None if forward is None else forward.observer.recording.timeline
        return None if timeline is None else timeline.as_dict()

    def dbo_cut_at(self, cuts: list[Any] | None) -> None:
        """Cut every step at these token offsets, as far as possible, whatever the settings say.

        Data parallel ranks take one list each, in rank order; each rank gets all lists. None returns to the settings.
        For tests and experiments. With data parallel ranks, call it only while no request runs, because the change
        would reach the ranks between different steps.

        Raises:
            SplitError: data parallel ranks got one list for all, or a cut is not a whole number.
        """
        forward = self._dbo_forward()
        if forward is None:
            return
        numbers = [cut for own in cuts or () for cut in (own if isinstance(own, list) else [own])]
        if not all(type(cut) is int for cut in numbers):
            raise SplitError(
                f"cuts {cuts!r:.200} must be whole numbers, or a list of them for each data parallel rank."
            )
        decider = forward.decider
        decider.choose_cuts = decider.choose_sizes = None
        if cuts and isinstance(cuts[0], list):
            decider.choose_sizes = partial(_keep_common, cuts)
        elif cuts and decider.rank is not None:
            raise SplitError(f"data parallel ranks take a list of cuts each, all of them in one call, not {cuts}.")
        elif cuts is not None:
            decider.choose_cuts = partial(_keep_possible, cuts)

    def dbo_cut_images_at(self, cuts: list[int] | None) -> None:
        """Cut every batch of images before these (0 is the first), whatever the settings say. None undoes this."""
        encoder = self._dbo_encoder()
        if encoder is not None:
            encoder.choose_cuts = None if cuts is None else partial(_keep_inside, cuts)

    def dbo_last_step(self) -> dict[str, Any] | None:
        """Return the last step's mode (`split` or `unsplit`), predicted seconds (or None), and measured seconds."""
        forward = self._dbo_forward()
        last_step = None if forward is None else forward.observer.last_step
        return None if last_step is None else last_step._asdict()

    def dbo_calibrate(self, path: str = "", budget: float | None = None, terminal: str = "") -> dict[str, Any] | None:
        """Measure the costs of ops, plan by them from now on, and write them to *path* if given.

        Call it only while no request runs. Returns the errors of the fit, as fields (`lab.calibrate.report.Report`), or
        None if no step of the model is split.

        Args:
            path: path of a cost file, on the first rank's host.
            budget: approximate seconds to take; by default as many as at a server's start.
            terminal: path of the terminal to show progress on, if that is not this process's own.
        """
        served = self._dbo_served()
        if served is None or served.costs is None:
            return None
        return served.costs.calibrate(path, budget, terminal)

    def dbo_predict(self, query_lens: list[int]) -> dict[str, float] | None:
        """Return the predicted seconds of a step of prefills of these lengths, unsplit and split.

        None without costs, or if there is no place to cut.
        """
        forward = self._dbo_forward()
        planner = None if forward is None else forward.runtime.planner
        if forward is None or planner is None:
            return None
        config = replace(forward.runtime.config, mode="always")
        batch = Batch(tuple(query_lens), sum(query_lens))
        if forward.decider.rank is None:
            choice = planner.choose(batch, config)
        else:
            choice = planner.choose_data_parallel([batch.tokens], config)
        return None if isinstance(choice, Decline) else choice.prediction._asdict()

    def dbo_configure(self, settings: dict[str, str]) -> None:
        """Read the settings again from the environment, with these on top, such as {"DBO_MODE": "off"}.

        Applies from the next step on. For tests and measurements. With data parallel ranks, call it only while no
        request runs.

        Raises:
            ConfigError: a setting is unknown, has a value that is not allowed, or is read at start only.
        """
        config = reread_environment(os.environ, settings)
        served = self._dbo_served()
        if served is not None:
            served.configure(config)

    def _dbo_served(self) -> ServedModel | None:
        return get_served_model(self.model_runner.get_model())

    def _dbo_forward(self) -> SplitForward | None:
        served = self._dbo_served()
        return None if served is None else served.forward

    def _dbo_encoder(self) -> SplitEncoder | None:
        served = self._dbo_served()
        return None if served is None else served.encoder


def _keep_inside(cuts: list[int], grids: Sequence[Grid]) -> list[int]:
    return [cut for cut in cuts if 0 < cut < len(grids)]


def _keep_possible(cuts: list[int], batch: Batch) -> list[int]:
    possible: list[int] = []
    for cut in cuts:
        with suppress(SplitError):
            slice_batch(batch, [*possible, cut])
            possible.append(cut)
    return possible


def _keep_common(cuts: list[list[int]], tokens: Sequence[int]) -> tuple[tuple[int, ...], ...] | Decline:
    """Return every rank's tokens in each micro-batch, for as many cuts as every rank has."""
    kept = [[cut for cut in own if cut < count] for own, count in zip(cuts, tokens, strict=True)]
    parts = 1 + min(map(len, kept))
    if parts < 2:
        return Decline("nowhere to cut", "a rank has fewer tokens than its first cut")
    edges = [[0, *own[: parts - 1], count] for own, count in zip(kept, tokens, strict=True)]
    return tuple(tuple(edge[part + 1] - edge[part] for edge in edges) for part in range(parts))
