"""The faults, what each does to running servers, and the sessions in which they happen one after the other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from examples.network_hosts import Host
from tests.support.reliability.clock import Clock
from tests.support.reliability.layouts import Layout
from tests.support.reliability.sandbox import Sandbox
from tests.support.reliability.servers import Servers

STOP_SECONDS = 20.0
DOWN_SECONDS = 5.0
JUMP_SECONDS = 3600
REMOVED_SECONDS = 10.0
VISITORS = 300


class Setting(NamedTuple):
    """What faults happen to."""

    servers: Servers
    hosts: tuple[Host, ...]
    clock: Clock


class Fault(NamedTuple):
    """A fault: how it is called, and what makes it happen. Returns when it has, or what it does is over."""

    title: str
    happen: Callable[[Setting], None]


class Session(NamedTuple):
    """Faults that happen to the servers of one layout, one after the other."""

    layout: Layout
    faults: tuple[Fault, ...]
    jumps: bool = False
    is_full_disk: bool = False

    def name(self, fault: Fault) -> str:
        """Return the title of a fault with that of the layout."""
        return f"{self.layout.title}: {fault.title}"


def kill_worker(setting: Setting) -> None:
    """Kill a worker that is in a split step."""
    os.kill(setting.servers.order("hold"), signal.SIGKILL)


def stop_worker(setting: Setting) -> None:
    """Stop a worker that is in a split step."""
    os.kill(setting.servers.order("hold"), signal.SIGSTOP)


def stop_worker_for_a_while(setting: Setting) -> None:
    """Stop a worker that is in a split step, and let it go on later."""
    worker = setting.servers.order("hold")
    os.kill(worker, signal.SIGSTOP)
    setting.servers.go_on()
    time.sleep(STOP_SECONDS)
    os.kill(worker, signal.SIGCONT)


def raise_in(lane: str) -> Callable[[Setting], None]:
    """Return what lets an op of a lane raise on one rank."""
    return lambda setting: _order(setting, "raise", lane)


def run_out_of_memory(setting: Setting) -> None:
    """Let an op ask for more memory than there is."""
    _order(setting, "allocate", "compute")


def _order(setting: Setting, act: str, lane: str) -> None:
    setting.servers.order(act, lane)


def terminate(setting: Setting) -> None:
    """Ask the first server to end while a worker is in a split step, which goes on a moment later."""
    setting.servers.order("hold")
    setting.servers.nodes[0].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    setting.servers.go_on()


def set_link(setting: Setting, state: str) -> None:
    """Switch the link between the hosts `up` or `down`."""
    host = setting.hosts[1]
    subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, state], check=True)


def lose_link(setting: Setting) -> None:
    """Take the link down in a split step."""
    setting.servers.order("hold")
    set_link(setting, "down")
    setting.servers.go_on()


def lose_link_for_a_while(setting: Setting) -> None:
    """Take the link down in a split step, and up again."""
    lose_link(setting)
    time.sleep(DOWN_SECONDS)
    set_link(setting, "up")


def jump_clock(setting: Setting) -> None:
    """Let the time of day be an hour later, then an hour earlier than it is."""
    for seconds in (JUMP_SECONDS, -JUMP_SECONDS, 0):
        setting.servers.order("hold")
        setting.clock.jump(seconds)
        setting.servers.go_on()
        time.sleep(3)


def let_clients_hang_up(setting: Setting) -> None:
    """Let many clients come at once, of which half leave before they are answered."""
    setting.servers.hang_up(VISITORS)


def remove_counts(setting: Setting) -> None:
    """Remove the folder in which counts are kept, as a cleaner of /tmp may, and let steps go by."""
    for folder in setting.servers.sandbox.find_temporary("dbo_runtime-*"):
        shutil.rmtree(folder)
    time.sleep(REMOVED_SECONDS)


def do_nothing(setting: Setting) -> None:
    """Let the disk be full, as it was since a moment after the start."""


def make_full_disk_variables(sandbox: Sandbox) -> dict[str, str]:
    """Return settings by which traces, costs and counts are all written where there is no room."""
    return {
        "DBO_TRACE": str(sandbox.temporary / "traces"),
        "DBO_COSTS": str(sandbox.temporary / "costs.json"),
        "DBO_CALIBRATE": "1",
    }


KILL = Fault("`kill -9` of a worker", kill_worker)
STOP = Fault(f"a worker is stopped for {STOP_SECONDS:.0f} s", stop_worker_for_a_while)
STOP_FOR_GOOD = Fault("a worker is stopped for good", stop_worker)
RAISE_COMPUTE = Fault("an op on `compute` raises", raise_in("compute"))
RAISE_COMM = Fault("an op on `comm` raises", raise_in("comm"))
NO_MEMORY = Fault("out of memory", run_out_of_memory)
TERMINATE = Fault("SIGTERM", terminate)
LINK = Fault(f"the link is down for {DOWN_SECONDS:.0f} s", lose_link_for_a_while)
LINK_FOR_GOOD = Fault("the link is down for good", lose_link)
JUMP = Fault("the time of day jumps by an hour, forth and back", jump_clock)
HANG_UP = Fault(f"{VISITORS} clients, of which half hang up", let_clients_hang_up)
FULL_DISK = Fault("the disk under traces, costs and counts is full", do_nothing)
REMOVED = Fault("the folder of counts is removed", remove_counts)

TENSOR, DATA = Layout("tensor"), Layout("data")
SESSIONS = (
    Session(
        TENSOR,
        (STOP, HANG_UP, JUMP, REMOVED, KILL, RAISE_COMPUTE, RAISE_COMM, NO_MEMORY, TERMINATE, STOP_FOR_GOOD),
        jumps=True,
    ),
    Session(TENSOR, (FULL_DISK,), is_full_disk=True),
    Session(DATA, (STOP, HANG_UP, KILL, RAISE_COMPUTE, TERMINATE, STOP_FOR_GOOD)),
    Session(Layout("tensor", 2, 2), (LINK, KILL, LINK_FOR_GOOD)),
    Session(Layout("data", 2, 2), (LINK, KILL, LINK_FOR_GOOD)),
)
