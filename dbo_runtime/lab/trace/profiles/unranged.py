"""The timeline of a step without this package's ranges: of unsplit vLLM, of vLLM's own DBO, of SGLang's TBO.

Communication is recognized by name: of NCCL, HCCL, gloo, vLLM, DeepEP and the like. On a device, the stream with most
computation is `compute`, and other computing streams are `side`. Each communicating stream is a separate lane, because
ops of one stream never overlap. If several threads besides the step's launched the computing kernels, as vLLM's DBO has
one per micro-batch, these threads are the micro-batches. Without kernels, ops of the step's thread are `compute`, and
communicating ops of any thread are `comm`.

Profiles do not say what an op waited for. It is assumed to have waited for the other lane's op that ended last before
it started, if it could have run earlier; on a device, only if it started soon after that op ended.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from dbo_runtime.ir.op import COMM, COMPUTE, SIDE
from dbo_runtime.lab.trace.profiles.events import Event, Kernel, Track
from dbo_runtime.lab.trace.profiles.steps import Step
from dbo_runtime.observe.timeline import Span, Timeline

WAKE_SECONDS = 20e-6  # from the end of a kernel to the start of one whose stream waited for it
MAX_COMM_LANES = 8

_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|hcom_|xccl|nvshmem|gloo:|mpi:|c10d|record_param_comms"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv"
    r"|cross_device_reduce|quick_?reduce|multimem|shm_"  # kernels of vLLM, FlashInfer and SGLang
    r"|deep_?ep|pplx|distribute_?(?:dispatch|combine)"  # kernels that send tokens to their experts and back
    r"|memcpy ptop"
)
_COPY = re.compile(r"memcpy (?:htod|dtoh)|memcpy_async")


def make_by_streams(step: Step, kernels: Iterable[Kernel]) -> Timeline:
    """Return the timeline of a step's kernels."""
    ran = [kernel for kernel in kernels if not is_host_copy(kernel.name)]
    communicates = {kernel.name: is_communication(kernel.name) for kernel in ran}
    computing: dict[Track, float] = {}
    for kernel in ran:
        if not communicates[kernel.name]:
            computing[kernel.track] = computing.get(kernel.track, 0.0) + kernel.end - kernel.start
    main = max(computing, key=lambda track: computing[track], default=None)
    streams = list(dict.fromkeys(kernel.track for kernel in ran if communicates[kernel.name]))
    threads = _find_micro_batches(step, [kernel for kernel in ran if not communicates[kernel.name]])
    spans = []
    for kernel, name in zip(ran, _number([kernel.name for kernel in ran]), strict=True):
        if communicates[kernel.name]:
            lane = _name_comm(streams.index(kernel.track))
        else:
            lane = COMPUTE if kernel.track == main else SIDE
        micro_batch = 0 if kernel.launch is None else threads.get(kernel.launch.track, 0)
        issued = None if kernel.launch is None else kernel.launch.time
        spans.append(Span(lane, name, micro_batch, kernel.start, kernel.end, issued))
    return Timeline(_add_waits(spans, WAKE_SECONDS))


def make_by_threads(step: Step, host: Iterable[Event]) -> Timeline:
    """Return the timeline of a step's host events, if no device ran anything."""
    communicating, computing = list[Event](), list[Event]()
    for event in host:
        if is_communication(event.name):
            communicating.append(event)
        elif event.track == step.track and "::" in event.name:  # neither an annotation nor part of the compiler
            computing.append(event)
    own = _join([event for event in communicating if event.track == step.track])
    pieces = [piece for event in _take_outermost(computing) for piece in _subtract(event, own)]
    events = [(COMPUTE, event) for event in pieces] + [(COMM, event) for event in _join(communicating)]
    events.sort(key=lambda each: each[1].start)
    names = _number([event.name for _, event in events])
    spans = [
        Span(lane, name, 0, event.start, event.end, event.start)
        for (lane, event), name in zip(events, names, strict=True)
    ]
    return Timeline(_add_waits(spans, math.inf))


def _find_micro_batches(step: Step, kernels: Iterable[Kernel]) -> dict[Track, int]:
    """Return each thread's micro-batch, if several threads besides the step's launched kernels."""
    launching = sorted((kernel.launch for kernel in kernels if kernel.launch), key=lambda launch: launch.time)
    threads = dict.fromkeys(launch.track for launch in launching if launch.track != step.track)
    if step.track is None or len(threads) < 2:
        return {}
    return {track: number for number, track in enumerate(threads)}


def _name_comm(number: int) -> str:
    number = min(number, MAX_COMM_LANES - 1)
    return COMM if number == 0 else f"{COMM}_{number + 1}"


def _number(names: Sequence[str]) -> list[str]:
    """Return the names, made unique by numbers."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered


def _add_waits(spans: Sequence[Span], soon: float) -> tuple[Span, ...]:
    """Return the spans by start, each with the op it is assumed to wait for: it ended at most *soon* s before."""
    ends = sorted((span.end, span.lane, span.op, span.micro_batch) for span in spans)
    free: dict[str, float] = {}
    found = []
    for span in sorted(spans, key=lambda each: each.start):
        since = free.get(span.lane, -math.inf)
        last = bisect_right(ends, span.start, key=lambda each: each[0]) - 1
        while last >= 0 and ends[last][0] > since and ends[last][1] == span.lane:
            last -= 1
        if last >= 0 and ends[last][0] > since and span.start - ends[last][0] <= soon:
            span = span._replace(waits=((ends[last][2], ends[last][3]),))
        free[span.lane] = max(since, span.end)
        found.append(span)
    return tuple(found)


def _take_outermost(events: Iterable[Event]) -> list[Event]:
    """Return one thread's events that are inside no other. Events come sorted by start, longer ones first."""
    outermost: list[Event] = []
    for event in sorted(events, key=lambda each: (each.start, -each.end)):
        if not outermost or event.start >= outermost[-1].end:
            outermost.append(event)
    return outermost


def _join(events: Iterable[Event]) -> list[Event]:
    """Join events that touch or overlap, under the name of the longest."""
    joined: list[tuple[Event, Event]] = []  # the joined event, and its longest part
    for event in sorted(events, key=lambda each: each.start):
        if joined and event.start <= joined[-1][0].end:
            whole, longest = joined[-1]
            longest = max(longest, event, key=lambda each: each.end - each.start)
            joined[-1] = whole._replace(name=longest.name, end=max(whole.end, event.end)), longest
        else:
            joined.append((event, event))
    return [whole for whole, _ in joined]


def _subtract(event: Event, others: Sequence[Event]) -> list[Event]:
    """Return the parts of an event outside *others*, which are sorted and disjoint."""
    pieces, start = [], event.start
    for other in others[max(0, bisect_right(others, event.start, key=lambda each: each.start) - 1) :]:
        if other.start >= event.end:
            break
        if other.start > start:
            pieces.append(event._replace(start=start, end=other.start))
        start = max(start, other.end)
    if start < event.end:
        pieces.append(event._replace(start=start))
    return pieces


def is_communication(name: str) -> bool:
    """Return whether a kernel or host op of this name communicates with other ranks."""
    return _COMMUNICATION.search(name.lower()) is not None


def is_host_copy(name: str) -> bool:
    """Return whether an event copies between host and device, which is neither computation nor communication."""
    return _COPY.search(name.lower()) is not None
