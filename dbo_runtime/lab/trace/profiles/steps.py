"""Find where the steps of a profile begin and end."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.profiles.events import Event, Events, Kernel, Track
from dbo_runtime.observe.ranges import is_step

MAX_STEPS = 10_000
# The narrowest kind of range in a profile is taken. The first are vLLM's (`VLLM_CUSTOM_SCOPES_FOR_PROFILING=1`, and
# always), the last is that of `torch.profiler.profile.step()`.
_STEPS = (
    re.compile(r"gpu_model_runner: forward"),
    re.compile(r"execute_(?:\d+_)?context_.*"),
    re.compile(r"ProfilerStep#\d+"),
)
IDLE = "execute_context_0(0)_generation_0(0)"  # a step of vLLM in which no request has a token
WHOLE = "all of it"


class Step(NamedTuple):
    """The time in which the host issued a step, in seconds.

    Attributes:
        label: name of the step in the profile.
        track: the thread that issued it; in a profile without named steps, the thread with most events; None without
            any.
        is_split: whether it is a step of this package, with ranges.
    """

    label: str
    track: Track | None
    start: float
    end: float
    is_split: bool = False


def find_steps(events: Events) -> list[Step]:
    """Return this package's steps, and other steps that contain none of them; without any, one step of all events.

    Raises:
        ConfigError: there are very many steps.
    """
    split = [_make_step(event, is_split=True) for event in events.host if is_step(event.name)]
    others: list[Step] = []
    for pattern in _STEPS:
        others = [_make_step(event) for event in events.host if pattern.fullmatch(event.name) and event.name != IDLE]
        if others:
            break
    starts: dict[Track | None, list[float]] = {}
    for step in split:
        starts.setdefault(step.track, []).append(step.start)
    found = [*split, *(step for step in others if not _has_any(step, starts.get(step.track, [])))]
    if len(found) > MAX_STEPS:
        raise ConfigError(f"traceEvents have {len(found)} steps, more than {MAX_STEPS}.")
    if not found:
        ran: Sequence[Event | Kernel] = [*events.host, *events.kernels]
        tracks = Counter(event.track for event in events.host)
        main = max(tracks, key=lambda track: tracks[track], default=None)
        found = [Step(WHOLE, main, min(event.start for event in ran), max(event.end for event in ran))]
    return sorted(found, key=lambda step: step.start)


def _make_step(event: Event, is_split: bool = False) -> Step:
    return Step(event.name, event.track, event.start, event.end, is_split)


def _has_any(step: Step, starts: Sequence[float]) -> bool:
    """Return whether one of the ascending *starts* is inside a step."""
    return bisect_left(starts, step.start) < bisect_right(starts, step.end)
