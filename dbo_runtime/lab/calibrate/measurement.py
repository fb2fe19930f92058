"""Measure the durations of the served model's ops, inside vLLM's worker while no request runs.

vLLM runs dummy batches of the requested lengths through the model. A harness replaces the model's forward. It runs
copies of the served forward with separate runtimes, so nothing measured here is counted, logged or kept there. Each
batch runs in three modes in turn, so that a disturbance affects all modes:

- `unsplit`: gives the seconds of the step;
- `sequential`: two micro-batches one after the other, gives the time of each op alone;
- `alternate`: two interleaved micro-batches, gives the time of ops while another lane runs;

Two more modes are added where a model needs them:

- `serial`, if ops of one micro-batch overlap each other (a dispatch and the shared experts), runs every op on the
  calling thread, so that these ops are also measured alone;
- `divided`, if there are divided ops, runs the ops that they are divided into, as nano-batches do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import DeclineError
from dbo_runtime.devices import Device
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.ir.divided_ops import divide_ops
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.calibrate.divided_costs import list_token_wise
from dbo_runtime.lab.calibrate.samples import Sample, measure_late, read_samples
from dbo_runtime.lab.calibrate.shapes import Shape, choose_repeats, choose_shapes, expect_round
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.vllm_plugin.api.dummy_batches import Limits, get_limits, run_dummy
from dbo_runtime.vllm_plugin.api.kv_agent import replace_agent
from dbo_runtime.vllm_plugin.parallel.joint_work import JointWork
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.warm_up import Phase

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SERVED_MODES = ("unsplit", "sequential", "alternate")  # steps in other modes tell of their ops only
STRIDE_TOKENS = 7919  # a prime, to spread tokens over the vocabulary: equal tokens are routed to the same experts

Progress = Callable[[int, int, str], None]
"""Called with the number of measured shapes, the number of all shapes, and the next shape; `done` at the end."""


class StepSample(NamedTuple):
    """One measured run of the forward."""

    mode: str  # see above; one of `SERVED_MODES` in `Measurements`
    loads: tuple[BatchFeatures, ...]  # one entry per micro-batch; one for an unsplit step
    seconds: float  # seconds of the forward call
    idle: float  # seconds between its first and last op in which no lane ran; 0 for an unsplit step
    late: float = 0.0  # idle seconds in which the host had not issued the next op
    issue: float = 0.0  # the host's seconds per op


TIMES = ("seconds", "idle", "late", "issue")


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measured runs of ops and of the forward, equal on all ranks.

    Attributes:
        samples: runs of ops.
        steps: runs of the forward.
        left_out: batches that no time was left for.
    """

    samples: list[Sample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    left_out: list[Shape] = field(default_factory=list)


def measure(
    runner: GPUModelRunner, forward: SplitForward, group: GroupCoordinator, budget: float, progress: Progress
) -> Measurements:
    """Measure ops and steps of a served model. Collective: all ranks call it together, while no request runs.

    The KV cache is read but not written. All ranks return the same result; see `merge_ranks`.

    Args:
        runner: vLLM's model runner.
        forward: the served forward. Its settings, counts and plans do not change.
        group: vLLM's coordinator of all ranks that communicate in a step.
        budget: approximate seconds to take after first runs. Small batches come first, larger ones if time is left.
        progress: function to report progress, called on every rank.

    Raises:
        DeclineError: vLLM's dummy batches cannot be split. The message says why.
        RankError: raised on all ranks if one of them fails, except for a failure in a step that others already wait in.
    """
    work = JointWork(group)
    with work.guard():
        shapes = choose_shapes(_agree_on_limits(work, get_limits(runner)))
        return _measure_shapes(shapes, _Harness(runner, forward, group, work), budget, progress)


def _measure_shapes(shapes: Sequence[Shape], harness: _Harness, budget: float, progress: Progress) -> Measurements:
    work, measurements = harness.work, Measurements()
    for shape in shapes[:1]:
        harness.run(shape, 0)  # the very first runs compile and allocate, as they do when serving
    rounds: list[tuple[Shape, float]] = []
    start, spent = time.perf_counter(), 0.0
    for number, shape in enumerate(shapes):
        if rounds and expect_round(rounds, shape) > budget - spent:
            measurements.left_out.append(shape)
            continue  # there may still be time for another shape
        progress(number, len(shapes), str(shape))
        first = harness.run(shape, 0)
        warm = _agree_on_time(work, start)
        repeats = choose_repeats(budget - warm, warm - spent)
        runs = [run for turn in range(1, 1 + repeats) for run in harness.run(shape, turn)]
        _add(measurements, _gather_runs(work, runs or first))  # a first run is slow: it is the first to touch memory
        now = _agree_on_time(work, start)
        rounds.append((shape, (now - spent) / (1 + repeats)))
        spent = now
    progress(len(shapes), len(shapes), "done")
    return measurements


def merge_ranks(samples: Sequence[Sample]) -> Sample:
    """Return one sample for the same run of the same op on all ranks [ranks].

    A compute op takes the mean. A communication op takes the shortest, because a rank that enters a collective early
    waits for the others.
    """
    if samples[0].lane == COMM:
        return min(samples, key=lambda sample: sample.seconds)
    return samples[0]._replace(
        seconds=fmean(s.seconds for s in samples),
        concurrent=fmean(s.concurrent for s in samples),
        was_queued=all(s.was_queued for s in samples),
    )


def overlaps_itself(program: Program) -> bool:
    """Return whether ops of one micro-batch run concurrently with each other."""
    return any(op.lane != COMPUTE and not {*op.writes} & {*after.reads} for op, after in pairwise(program.ops))


class _Run(NamedTuple):
    """One run of a shape on one rank."""

    step: StepSample
    samples: list[Sample]  # in the same order on all ranks


class _Harness:
    """Replaces a model's forward while vLLM runs dummy batches, and measures the time."""

    def __init__(self, runner: GPUModelRunner, served: SplitForward, group: GroupCoordinator, work: JointWork) -> None:
        self._runner = runner
        self.work = work
        self._vocabulary = runner.model_config.get_vocab_size()
        self._seconds = 0.0
        self._issued = 0.0
        self._device = device = served.runtime.device
        self._ops = len(served.runtime.program.ops)
        program = served.runtime.program
        self._forwards = {
            "unsplit": _copy_forward(served, device, "sequential", group),
            "sequential": _copy_forward(served, device, "sequential", group),
            "alternate": _copy_forward(served, device, "alternate", group),
        }
        if overlaps_itself(program):
            self._forwards["serial"] = _copy_forward(served, SerialDevice(device), "sequential", group)
        self._token_wise = list_token_wise(program)
        if self._token_wise:
            self._forwards["divided"] = _copy_forward(served, device, "sequential", group, divide_ops(program))
        self._forward = self._forwards["unsplit"]

    def run(self, shape: Shape, turn: int) -> list[_Run]:
        """Run a batch of this shape once in each mode. Where ops run alone, turns vary the cut and so the batches."""
        cuts = shape.cuts
        alone = cuts[(turn + 1) % len(cuts)]
        return [self._run(shape, mode, cuts[0] if mode == "alternate" else alone) for mode in self._forwards]

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        *_: object,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """Run the forward on varied tokens, at the same time on all ranks, and measure its seconds."""
        tokens = torch.arange(positions.shape[-1], device=positions.device) * STRIDE_TOKENS % self._vocabulary
        tokens = tokens.to(torch.int32)  # same type as vLLM's
        _fill(intermediate_tensors)
        self.work.gather()
        self._device.synchronize()
        start = time.perf_counter()
        results = self._forward(tokens, positions, intermediate_tensors, **kwargs)
        self._issued = time.perf_counter() - start
        self._device.synchronize()
        self._seconds = time.perf_counter() - start
        return results

    def _run(self, shape: Shape, mode: str, cut: int) -> _Run:
        self._forward = self._forwards[mode]
        decider = self._forward.decider
        self._forward.phase = Phase.STARTING if mode == "unsplit" else Phase.SERVING
        decider.choose_cuts, decider.decode_len = (lambda _: [cut]), 1  # as `Shape` has it: nothing is drafted
        decider.choose_sizes = lambda tokens: ((cut,) * len(tokens), (shape.total - cut,) * len(tokens))
        if mode != "unsplit":
            self._forward.observer.recording.request()
        model = self._runner.get_model()
        served, model.forward = model.forward, self
        try:
            with replace_agent(None):  # dummy batches must not be transferred
                run_dummy(self._runner, shape.requests, shape.tokens, shape.context)
        finally:
            model.forward = served
        if mode == "unsplit":
            issue = self._issued / self._ops
            return _Run(StepSample(mode, (shape.measure_features(),), self._seconds, 0.0, issue=issue), [])
        timeline = self._forward.observer.recording.timeline
        if timeline is None:
            reasons = ", ".join(self._forward.runtime.statistics.declined)
            raise DeclineError("vLLM's dummy batch cannot be split", f"{shape}: {reasons}")
        loads = shape.measure_parts(cut)
        step = StepSample(mode, loads, self._seconds, timeline.idle, measure_late(timeline), timeline.measure_issue())
        samples = read_samples(timeline, loads)
        return _Run(step, [one for one in samples if one.op in self._token_wise] if mode == "divided" else samples)


def _fill(received: IntermediateTensors | None) -> None:
    """Fill the previous stage's tensors with random values: equal tokens would be routed to the same experts."""
    for tensor in () if received is None else received.tensors.values():
        tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(STRIDE_TOKENS))


def _copy_forward(
    served: SplitForward, device: Device, policy: str, group: GroupCoordinator, program: Program | None = None
) -> SplitForward:
    """Return a forward of the same model that splits by *policy*, whatever the settings are; see `copy_for`."""
    # `side`, if the program has it
    config = RuntimeConfig(enabled=True, mode="always", split="micro", policy=(policy, 0), side="on")
    own = served.copy_for(device, config, group, program)
    own.decider.checks_turns = False  # dummy batches have no KV connector, so any order may be measured
    own.runtime.plan(Batch((1, 1), 0), cuts=[1])  # makes the schedule, which is no part of a step
    return own


def _gather_runs(work: JointWork, own: Sequence[_Run]) -> list[list[_Run]]:
    """Return the runs of each rank [ranks][runs], parsed from the exchanged lists."""
    return [[_read_run(*run) for run in runs] for runs in work.gather(own)]


def _read_run(step: Sequence[Any], samples: Sequence[Any]) -> _Run:
    mode, loads, *times = step
    read = [Sample(op, lane, BatchFeatures(*features), *more) for op, lane, features, *more in samples]
    return _Run(StepSample(mode, tuple(BatchFeatures(*load) for load in loads), *times), read)


def _agree_on_limits(work: JointWork, own: Limits) -> Limits:
    return Limits(*(min(limit) for limit in zip(*work.gather(own), strict=True)))


def _agree_on_time(work: JointWork, start: float) -> float:
    """Return the seconds since *start* on the slowest rank, so that all ranks decide alike whether to go on."""
    seconds: list[float] = work.gather(time.perf_counter() - start)
    return max(seconds)


def _add(measurements: Measurements, runs_of_ranks: Sequence[Sequence[_Run]]) -> None:
    """Add the runs of one shape on all ranks [ranks][runs]."""
    for runs in zip(*runs_of_ranks, strict=True):
        measurements.samples.extend(map(merge_ranks, zip(*(run.samples for run in runs), strict=True)))
        steps = [run.step for run in runs]
        if steps[0].mode in SERVED_MODES:
            times = {name: fmean(getattr(step, name) for step in steps) for name in TIMES}
            measurements.steps.append(steps[0]._replace(**times))
