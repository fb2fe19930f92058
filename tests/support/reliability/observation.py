"""What became of servers and clients after a fault."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.reliability.client import Seen
from tests.support.reliability.scenarios import Fault, Setting, do_nothing, set_link
from tests.support.reliability.servers import NotUpError, Servers, find_cause, find_warnings

PATIENCE_SECONDS = 120.0  # after which what is left counts as hanging
SERVING_ANSWERS = 40  # to requests that came after the fault: then it serves on


@dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
        clients: what they saw.
        cause: what the log says; empty if nothing.
        end: whether servers serve on, or when their processes were gone.
        left: processes and files that were left.
        again: how a start at once went; empty where servers serve on.
    """

    clients: str
    cause: str
    end: str
    left: str
    again: str = ""


def observe(setting: Setting, fault: Fault, restarts: bool = True) -> Outcome:
    """Let a fault happen under load, and return what became of it. Those that it ends are started again.

    Raises:
        NotUpError: if its op does not come by.
    """
    servers = setting.servers
    servers.load()
    log, began = servers.measure_log(), time.monotonic()
    fault.happen(setting)
    end, left = _watch(servers, began)
    servers.stop_load()
    seen = [one for one in servers.read_answers() if one.asked + one.seconds >= began]
    is_old = fault.happen is do_nothing  # then it has been there since the start
    cause = find_warnings(servers.read_log([0] * len(log))) if is_old else find_cause(servers.read_log(log))
    if end == "serves on":
        return Outcome(summarise(seen), cause, end, "")
    return Outcome(summarise(seen), cause, end, left, _start_again(setting) if restarts else "")


def _watch(servers: Servers, began: float) -> tuple[str, str]:
    """Return how it ends, and what is left then."""
    happened = time.monotonic()
    while time.monotonic() < happened + PATIENCE_SECONDS:
        if servers.watch_end(0.0)[0] is not None:
            return f"gone after {time.monotonic() - began:.0f} s", describe_left(servers, {})
        later = [one for one in servers.read_answers() if one.asked > happened and one.outcome == "right"]
        if len(later) >= SERVING_ANSWERS:
            return "serves on", ""
        time.sleep(0.2)
    left = servers.watch_end(0.0)[1]
    return f"hangs for {PATIENCE_SECONDS:.0f} s and longer", describe_left(servers, left)


def describe_left(servers: Servers, processes: dict[int, str]) -> str:
    """Return what is left, by kind."""
    files = Counter(_name_kind(name) for name in servers.sandbox.list_files())
    kinds = {**Counter(processes.values()), **files}
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _name_kind(name: str) -> str:
    """Return a file's name without what differs from run to run."""
    folder, _, last = name.rpartition("/")
    head = last.partition("_")[0].partition("-")[0]
    return f"`{folder}/{head}*`" if not _is_random(head) else f"`{folder}/*`"


def _is_random(name: str) -> bool:
    return len(name) >= 8 and any(letter.isdigit() for letter in name)


def _start_again(setting: Setting) -> str:
    servers = setting.servers
    servers.sandbox.end_all()
    servers.sandbox.empty()
    if setting.hosts:
        set_link(setting, "up")
    try:
        return f"after {servers.start():.0f} s"
    except NotUpError as error:
        return str(error)


def summarise(seen: Sequence[Seen]) -> str:
    """Return what clients saw, the most frequent first, and the longest time that a right answer took."""
    counts = Counter(one.outcome for one in seen if one.outcome != "connection refused")
    longest = max((one.seconds for one in seen if one.outcome == "right"), default=0.0)
    words = [f"{count} {outcome}" for outcome, count in counts.most_common() if outcome != "right"]
    if counts["right"]:
        words.insert(0, f"{counts['right']} right, one after {longest:.1f} s")
    if any(one.outcome == "connection refused" for one in seen):
        words.append("then connection refused")
    return ", ".join(words)
