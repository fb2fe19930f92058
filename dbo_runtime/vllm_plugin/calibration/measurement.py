"""How long the served model's own ops take, measured inside vLLM's worker with no request.

vLLM runs its dummy batches, with the lengths that are asked for, through the model; in the place of the model's forward
stands a copy of the served one with a runtime of its own, so nothing that is measured here is counted, logged or left
behind there. Each batch runs three ways in turn, so that a disturbance meets all of them:

- `whole`: unsplit, for the seconds of the step;
- `sequential`: in two micro-batches one after the other, for what each op takes alone;
- `alternate`: in two micro-batches in turns, for what ops take beside another lane;

and a fourth way, `serial`, where a micro-batch's ops overlap each other (a dispatch the shared experts): every op on
the calling thread, so that these are measured alone, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import DeclineError
from dbo_runtime.devices import Device
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.samples import Sample
from dbo_runtime.program import COMM, COMPUTE, Program
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.calibration.shapes import Shape, choose_shapes
from dbo_runtime.vllm_plugin.parallel.agreement import gather
from dbo_runtime.vllm_plugin.step.forward import SplitForward

MOST_REPEATS = 3  # of each shape, after a round to warm up; layers are repeats, too
LONG = 1.0  # seconds of a round that is repeated twice at most: once for each cut

STRIDE = 7919  # a prime, by which our tokens walk through the vocabulary: tokens alike would meet the same experts

Progress = Callable[[int, int, str], None]
"""Told how many shapes are done, of how many, and what comes next; the last time, why it is over."""


class StepSample(NamedTuple):
    """One measured run of the forward."""

    way: str  # "whole", "sequential" or "alternate"
    loads: tuple[BatchFeatures, ...]  # of its micro-batches; one for a whole step
    seconds: float  # of the whole forward call
    idle: float  # seconds between its first op and the last in which no lane ran anything; 0 for a whole step


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured, the same on every rank: runs of ops, and runs of the forward."""

    samples: list[Sample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)


def measure(runner: Any, forward: SplitForward, group: Any, budget: float, progress: Progress) -> Measurements:
    """Measure ops and steps of a served model. Collective: all ranks call it together, while no request runs.

    The KV cache is read but not written. All ranks return the same; see `merge_ranks`.

    Args:
        runner: vLLM's model runner.
        forward: the forward that was put into its model. Its settings, counts and plans stay as they are.
        group: vLLM's coordinator of all ranks that communicate in a step.
        budget: seconds to take, about, after first runs. Small batches come first, larger ones if there is time.
        progress: told what is measured, on every rank.

    Raises:
        DeclineError: if vLLM's dummy batches cannot be split, with the reason.
    """
    shapes = choose_shapes(_agree_on_limits(group, compat.get_limits(runner)))
    stand = _Stand(runner, forward, group)
    found = Measurements()
    for shape in shapes[:1]:
        stand.run(shape, 0)  # the very first runs compile and allocate: serving would have done it, too
    rounds: list[tuple[Shape, float]] = []
    start, spent = time.perf_counter(), 0.0
    for number, shape in enumerate(shapes):
        if rounds and expect_round(rounds, shape) > budget - spent:
            continue  # there may still be time for another one
        progress(number, len(shapes), str(shape))
        first = stand.run(shape, 0)
        warm = _agree_on_time(group, start)
        repeats = choose_repeats(budget - warm, warm - spent)
        runs = [run for turn in range(1, 1 + repeats) for run in stand.run(shape, turn)]
        _add(found, gather(group, runs or first))  # memory that a first run is the first to touch is slow
        now = _agree_on_time(group, start)
        rounds.append((shape, (now - spent) / (1 + repeats)))
        spent = now
    progress(len(shapes), len(shapes), "done")
    return found


def choose_repeats(left: float, round_seconds: float) -> int:
    """Return how often to repeat a shape whose round takes so long, with *left* seconds for it and all others.

    At most half of the time goes to it, so that there is some left for larger shapes.
    """
    most = 2 if round_seconds > LONG else MOST_REPEATS
    return max(0, min(most, int(left / 2 / round_seconds)))


def expect_round(rounds: Sequence[tuple[Shape, float]], shape: Shape) -> float:
    """Return the least seconds that a round of *shape* takes, after those that smaller ones took.

    What it takes beyond the first, which is the smallest, grows with the tokens of as many requests at least.
    """
    (_, fixed), *others = rounds
    alike = [(seconds - fixed) / other.total for other, seconds in others if other.requests == shape.requests]
    return fixed + max(0.0, *alike[-1:]) * shape.total if alike else fixed


def merge_ranks(samples: Sequence[Sample]) -> Sample:
    """Return what stands for the same run of the same op on all ranks [ranks].

    A compute op takes the mean. Who comes early to a collective waits for the others, so of a communication op the
    shortest counts.
    """
    if samples[0].lane == COMM:
        return min(samples, key=lambda sample: sample.seconds)
    return samples[0]._replace(
        seconds=fmean(s.seconds for s in samples), concurrent=fmean(s.concurrent for s in samples)
    )


def overlaps_itself(program: Program) -> bool:
    """Return whether ops of one micro-batch run beside each other even if nothing else does."""
    return any(op.lane != COMPUTE and not {*op.writes} & {*after.reads} for op, after in pairwise(program.ops))


class _Run(NamedTuple):
    """One run of a shape on one rank; see `StepSample`."""

    way: str
    loads: tuple[BatchFeatures, ...]
    seconds: float
    idle: float
    samples: list[Sample]  # in an order that is the same on all ranks


class _Stand:
    """A test stand: takes the place of a model's forward while vLLM runs dummy batches, and takes the time."""

    def __init__(self, runner: Any, served: SplitForward, group: Any) -> None:
        self._runner = runner
        self._group = group
        self._vocabulary = runner.model_config.get_vocab_size()
        self._seconds = 0.0
        self._device = device = served.runtime.device
        program = served.runtime.program
        self._forwards = {
            "whole": _copy_forward(served, device, "sequential", group),
            "sequential": _copy_forward(served, device, "sequential", group),
            "alternate": _copy_forward(served, device, "alternate", group),
        }
        if overlaps_itself(program):
            self._forwards["serial"] = _copy_forward(served, SerialDevice(device), "sequential", group)
        self._forward = self._forwards["whole"]

    def run(self, shape: Shape, turn: int) -> list[_Run]:
        """Run a batch of this shape once each way. Where ops run alone, turns take other cuts, for other loads."""
        cuts = shape.cuts
        alone = cuts[(turn + 1) % len(cuts)]
        return [self._run(shape, way, cuts[0] if way == "alternate" else alone) for way in self._forwards]

    def __call__(
        self, input_ids: Any, positions: torch.Tensor, intermediate_tensors: Any = None, *_: Any, **kwargs: Any
    ) -> Any:
        """Run the forward on tokens of our own, at the same time on all ranks, and note how long it takes."""
        tokens = torch.arange(positions.shape[-1], device=positions.device) * STRIDE % self._vocabulary
        tokens = tokens.to(torch.int32)  # as vLLM's are
        _fill(intermediate_tensors)
        if self._group.world_size > 1:
            dist.barrier(group=self._group.cpu_group)
        self._device.synchronize()
        start = time.perf_counter()
        hidden = self._forward(tokens, positions, intermediate_tensors, **kwargs)
        self._device.synchronize()
        self._seconds = time.perf_counter() - start
        return hidden

    def _run(self, shape: Shape, way: str, cut: int) -> _Run:
        self._forward = self._forwards[way]
        planner = self._forward.planner
        planner.serving = way != "whole"
        planner.choose_cuts = lambda _: [cut]
        planner.choose_sizes = lambda tokens: ((cut,) * len(tokens), (shape.total - cut,) * len(tokens))
        if way != "whole":
            self._forward.recording.request()
        model = self._runner.get_model()
        served, model.forward = model.forward, self
        try:
            compat.run_dummy(self._runner, shape.requests, shape.tokens, shape.context)
        finally:
            model.forward = served
        if way == "whole":
            return _Run(way, (shape.measure_features(),), self._seconds, 0.0, [])
        timeline = self._forward.recording.timeline
        if timeline is None:
            reasons = ", ".join(self._forward.runtime.statistics.declined)
            raise DeclineError(f"vLLM's dummy batch of {shape} cannot be split: {reasons}")
        loads = shape.measure_parts(cut)
        return _Run(way, loads, self._seconds, timeline.idle, _read_samples(timeline, loads))


def _fill(handed: Any) -> None:
    """Fill in what the stage before would have handed over: tokens that are alike would meet the same experts."""
    for tensor in () if handed is None else handed.tensors.values():
        tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(STRIDE))


def _copy_forward(served: SplitForward, device: Device, policy: str, group: Any) -> SplitForward:
    """Return a forward of the same model that splits by a policy, whatever the settings are."""
    config = RuntimeConfig(enabled=True, mode="always", policy=(policy, 0), side="on")  # where the program has it
    own = served.copy_for(device, config, group)
    own.runtime.plan(Batch((1, 1), 0), cuts=[1])  # makes the schedule, which is no part of a step
    return own


def _agree_on_limits(group: Any, own: compat.Limits) -> compat.Limits:
    return compat.Limits(*(min(limit) for limit in zip(*gather(group, own), strict=True)))


def _agree_on_time(group: Any, start: float) -> float:
    """Return the seconds since *start* on the slowest rank: by them all ranks decide alike whether to go on."""
    seconds: list[float] = gather(group, time.perf_counter() - start)
    return max(seconds)


def _read_samples(timeline: Timeline, loads: Sequence[BatchFeatures]) -> list[Sample]:
    """Return the spans of a timeline as samples, by micro-batch and op: their order in time differs between ranks."""
    spans = zip(timeline.spans, timeline.measure_concurrent(), strict=True)
    return [
        Sample(span.op.rpartition(".")[2], span.lane, loads[span.micro_batch], span.end - span.start, beside)
        for span, beside in sorted(spans, key=lambda item: (item[0].micro_batch, item[0].op))
    ]


def _add(found: Measurements, runs_of_ranks: Sequence[Sequence[_Run]]) -> None:
    """Add the runs of one shape on all ranks [ranks][runs]."""
    for runs in zip(*runs_of_ranks, strict=True):
        found.samples.extend(map(merge_ranks, zip(*(run.samples for run in runs), strict=True)))
        if runs[0].way != "serial":  # which is no way to serve
            seconds, idle = fmean(run.seconds for run in runs), fmean(run.idle for run in runs)
            found.steps.append(StepSample(runs[0].way, runs[0].loads, seconds, idle))
