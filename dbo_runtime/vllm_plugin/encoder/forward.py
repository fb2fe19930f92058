"""The forward of a vision encoder: split at image boundaries if that is faster, otherwise vLLM's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch

from dbo_runtime.adapters.contract import EncoderAdapter
from dbo_runtime.batch import Batch, share_by_work
from dbo_runtime.decline import Decline
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.executor import Executor
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import SplitError
from dbo_runtime.observe.declines import warn_declined
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.differences import describe_difference
from dbo_runtime.vllm_plugin.step.failures import attempt, call_adapter
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

Grid: TypeAlias = Sequence[int]
"""An image or a video: (time, height, width) in patches."""

RESULTS = "embeddings of images"


class SplitEncoder:
    """Replaces the `forward` of a loaded encoder instance.

    Each image or video is a request, and its patches are the tokens. It is not cut. All ranks that share the encoder
    get the same images, so they all decide alike.

    Args:
        encoder: the encoder module.
        adapter: the adapter for its class.
        runtime: the runtime that runs plans.
        transport: means of communication between the ranks; see `Platform.get_transport`.
        agreement: the agreement of the ranks that share the encoder, for forwards that are compared.
        metrics: the counts of forwards; None on ranks that do not count.
        group: coordinator of the ranks that share the encoder, which tell each other if the first split forward fails;
            None to raise its error instead.

    Attributes:
        choose_cuts: function that returns the images to cut before, whatever the settings say; None if not set.
        first_steps: the comparison of first forwards; None if not needed.
        refusal: reason why no forward is split, after the first one failed; None while forwards are split.
    """

    def __init__(
        self,
        encoder: torch.nn.Module,
        adapter: EncoderAdapter,
        runtime: MicroBatchRuntime,
        transport: str,
        agreement: Agreement,
        metrics: Metrics | None = None,
        group: GroupCoordinator | None = None,
    ) -> None:
        self.runtime = runtime
        self.choose_cuts: Callable[[Sequence[Grid]], Sequence[int]] | None = None
        self.first_steps: FirstSteps | None = None
        self.refusal: Decline | None = None
        self._group = group
        self._is_serving = False  # profiling and warm-up come first and are not counted
        self._agreement = agreement
        self._metrics = metrics
        self._encoder = encoder
        self._forward: Callable[..., torch.Tensor] = encoder.forward
        self._adapter = adapter
        self._transport = transport

    def install(self) -> None:
        """Replace the encoder's forward."""
        self._encoder.forward = self

    def start_serving(self) -> None:
        """Count forwards from now on, because vLLM's warm-up is over."""
        self._is_serving = True

    def __call__(
        self, x: torch.Tensor, grid_thw: torch.Tensor | Sequence[Grid] | None, **kwargs: object
    ) -> torch.Tensor:
        """Embed images: patches [patches, values], one grid per image [images][3] -> embeddings [tokens, hidden]."""
        run_unsplit = partial(self._forward, x, grid_thw, **kwargs)
        grids, plan = self._plan(x, grid_thw, kwargs)
        if self._metrics is not None and self._is_serving:
            self._metrics.count_encoder(plan)
        if self.runtime.config.check:
            statement = str(plan) if isinstance(plan, Decline) else f"{plan.digest}, cuts at {plan.cuts}"
            self._agreement.compare(statement)
        if isinstance(plan, Decline):
            self.runtime.decline(plan)
            return run_unsplit()
        embeddings = self._run_first(plan, x, grids)
        if isinstance(embeddings, Decline):
            self.runtime.decline(embeddings)
            return run_unsplit()
        is_checked = bool(self.runtime.config.check)
        kind = (plan.digest, x.shape[0].bit_length(), len(grids).bit_length())
        if not is_checked and (self.first_steps is None or not self.first_steps.takes(kind)):
            return embeddings
        unsplit = run_unsplit()
        own = describe_difference({RESULTS: embeddings}, {RESULTS: unsplit}, plan, accepts_rerouted=True)
        difference = self._agreement.find_first(own)
        if self.first_steps is not None and not is_checked:
            self.first_steps.observe(kind, difference)
            return unsplit
        if difference:
            raise SplitError(difference)
        return embeddings

    def _run_first(self, plan: ExecutionPlan, x: torch.Tensor, grids: list[Grid]) -> torch.Tensor | Decline:
        """Run a plan. If it is the first one and fails on any rank, no forward is split any more, on all ranks."""
        if self._group is None:
            return self._run(plan, x, grids)

        serial = self._make_serial(plan)

        def run() -> torch.Tensor:
            embeddings = self._run(serial, x, grids)
            self.runtime.device.synchronize()
            return embeddings

        embeddings = attempt(self._group, "images", run)
        if isinstance(embeddings, Decline):
            self.refusal = embeddings
            log = open_log(quiet=self._group.rank_in_group > 0)
            warn_declined(log, "every forward of the vision encoder", embeddings)
        self._group = None
        return embeddings

    def _make_serial(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan whose ops run on one lane, as watched ops do: see `rehearse`."""
        if plan.executor.is_serial:
            return plan
        device = SerialDevice(self.runtime.device)
        return replace(plan, executor=Executor(plan.executor.schedule, device, EventTable(device)))

    def _run(self, plan: ExecutionPlan, x: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
        program, images = self.runtime.program, {"pixels": x, "grids": grids}
        inputs = [program.cut_inputs(images, piece.tokens, piece.requests) for piece in plan.slices]
        return torch.cat([embedded for (embedded,) in self.runtime.run(plan, inputs)])

    def _plan(
        self, x: torch.Tensor, grid_thw: torch.Tensor | Sequence[Grid] | None, kwargs: dict[str, object]
    ) -> tuple[list[Grid], ExecutionPlan | Decline]:
        """Return the grids on the host, and the plan, or a decline."""
        unexpected = sorted(name for name, value in kwargs.items() if value is not None)
        if unexpected or grid_thw is None:
            return [], Decline("the encoder is given more than images", ", ".join(unexpected))
        grids: list[Grid] = grid_thw.tolist() if isinstance(grid_thw, torch.Tensor) else list(grid_thw)
        patches = tuple(math.prod(map(int, grid)) for grid in grids)
        if sum(patches) != x.shape[0]:
            return grids, Decline("images and their grids do not match", f"{sum(patches)} patches, not {x.shape[0]}")
        cuts = self._check_early(patches) or self._choose_cuts(grids)
        if isinstance(cuts, Decline):
            return grids, cuts
        if not cuts:
            return grids, Decline("images cannot be shared out", f"{len(grids)} of {sum(patches)} patches")
        edges = [0, *accumulate(patches)]
        return grids, self.runtime.plan(Batch(patches, sum(patches), cuttable=False), [edges[cut] for cut in cuts])

    def _check_early(self, patches: Sequence[int]) -> Decline | None:
        """Decline images by their number, size and transport alone. Chosen cuts come first."""
        if self.refusal is not None:
            return self.refusal
        if self.first_steps is not None and self.first_steps.failure is not None:
            return self.first_steps.failure
        if len(patches) < 2:
            return Decline("one image cannot be cut" if patches else "no images")
        if self.choose_cuts is not None:
            return None
        return self.runtime.check_transport(self._transport) or self.runtime.decline_early(sum(patches))

    def _choose_cuts(self, grids: Sequence[Grid]) -> tuple[int, ...] | Decline:
        """Return the indices of the images to cut before."""
        if self.choose_cuts is not None:
            return tuple(self.choose_cuts(grids))
        work = call_adapter(
            self._adapter, lambda: [self._adapter.estimate_flops(self._encoder, grid) for grid in grids]
        )
        if isinstance(work, Decline):
            return work
        cuts = share_by_work(work, self.runtime.config.parts)
        smallest = min(sum(work[left:right]) for left, right in pairwise([0, *cuts, len(work)]))
        share = smallest * (len(cuts) + 1) / (sum(work) or 1.0)
        return (self.runtime.check_balance(share) if cuts else None) or cuts
