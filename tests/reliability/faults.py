"""Faults under load: `python -m tests.reliability.faults --write-page`. Needs root, iproute2, a C compiler.

Each fault meets real servers of the tiny model that answer clients at the time, in a split step where one can choose it
(`server_plugin`), and for comparison the same happens to vLLM without this package. Processes of a run have a /dev/shm
and a temporary folder of their own, so that what is left there is theirs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.network_hosts import TwoHosts
from tests.support.kept import keep
from tests.support.page import ROOT, tell_section
from tests.support.reliability.clock import Clock
from tests.support.reliability.layouts import find_place
from tests.support.reliability.observation import Outcome, observe
from tests.support.reliability.page import PAGE
from tests.support.reliability.refusals import REFUSALS, Refusal, refuse
from tests.support.reliability.report import Row, make_lines
from tests.support.reliability.sandbox import Sandbox
from tests.support.reliability.scenarios import SESSIONS, Session, Setting, make_full_disk_variables
from tests.support.reliability.server_plugin import plant
from tests.support.reliability.servers import OFF, ON, NotUpError, Servers

COMMAND = "python -m tests.reliability.faults --write-page"
# vLLM's own CPU build fails with data parallel experts, which dbo_runtime patches: that is compared unsplit.
SIDES = {"tensor": {"on": ON, "off": OFF}, "data": {"on": ON, "off": {**ON, "DBO_MODE": "off"}}}
Tell = Callable[[str, str, str, Outcome], None]


class Table:
    """The outcomes so far, which are kept: sessions may be run apart. The page shows them after each."""

    def __init__(self, is_written: bool) -> None:
        self._is_written = is_written

    def add(self, fault: str, layout: str, side: str, outcome: Outcome) -> None:
        """Add what became of a fault, with overlap (`on`) or with vLLM alone (`off`)."""
        print(f"{side}: {fault} ({layout}): {outcome}", flush=True)
        found = {"fault": fault, "layout": layout, "side": side, "outcome": asdict(outcome)}
        self._show(keep("faults", {f"{layout}: {fault}, {side}": found}))

    def show(self) -> None:
        """Write all outcomes that are kept."""
        self._show(keep("faults", {}))

    def _show(self, kept: Mapping[str, Any]) -> None:
        rows: dict[tuple[str, str], Row] = {}
        for found in kept.values():
            row = rows.setdefault((found["fault"], found["layout"]), Row(found["fault"], found["layout"]))
            row.outcomes[found["side"]] = Outcome(**found["outcome"])
        shown = sorted((row for row in rows.values() if "on" in row.outcomes), key=_find_place)
        tell_section(self._is_written, "faults", COMMAND, make_lines(shown), PAGE)


def _find_place(row: Row) -> int:
    """Return where a row stands: as faults are listed in `SESSIONS` and `REFUSALS`."""
    listed = [(fault.title, session.layout.title) for session in SESSIONS for fault in session.faults]
    listed += [(refusal.title, refusal.layout.title) for refusal in REFUSALS]
    key = (row.fault, row.layout)
    return listed.index(key) if key in listed else len(listed)


def main() -> int:
    """Run all faults, or those whose title has a word in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-page", action="store_true", help="write the section of docs/reliability.md")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="faults with one of these in layout and title"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an error would: nothing is left behind
    table = Table(arguments.write_page)

    def is_chosen(title: str) -> bool:
        return any(words in title for words in arguments.only)

    for session in SESSIONS:
        chosen = tuple(fault for fault in session.faults if is_chosen(session.name(fault)))
        if chosen:
            run_both(session._replace(faults=chosen), table.add)
    for refusal in REFUSALS:
        if is_chosen(f"{refusal.layout.title}: {refusal.title}"):
            run_refusal(refusal, table.add)
    table.show()
    return 0


def run_both(session: Session, tell: Tell) -> None:
    """Run a session with overlap and with vLLM alone, at the same time: most of it is waiting."""
    started: list[Servers] = []
    threads = [threading.Thread(target=run_session, args=(session, side, tell, started)) for side in ("on", "off")]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # interrupted: let both leave nothing behind
        for servers in started:
            servers.give_up()
        raise


def run_session(session: Session, side: str, tell: Tell, started: list[Servers]) -> None:
    """Start servers, let each fault of a session happen to them, and start them again after each that ends them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rel-")))
        hosts = stack.enter_context(TwoHosts(None, side)) if session.layout.hosts > 1 else ()
        sandbox = stack.enter_context(Sandbox(folder))
        clock = Clock(folder)
        variables = make_variables(folder, SIDES[session.layout.parallel][side])
        variables |= clock.variables if session.jumps else {}
        if session.is_full_disk and side == "on":
            variables |= make_full_disk_variables(sandbox)
        servers = Servers(session.layout, find_place(hosts), sandbox, variables)
        started.append(servers)
        stack.callback(servers.stop_load)
        setting = Setting(servers, hosts, clock)
        try:
            servers.start(meanwhile=sandbox.fill_disk_when_used if session.is_full_disk else None)
            for fault in session.faults:
                tell(fault.title, session.layout.title, side, observe(setting, fault))
        except NotUpError as error:
            print(f"{side}: {session.layout.title}: {error}\n{servers.read_log([0] * session.layout.nodes)}")


def make_variables(folder: Path, settings: Mapping[str, str] = ON) -> dict[str, str]:
    """Return the variables of servers with these settings, that load the plugin `planted`."""
    path = [plant(folder / "plugins"), str(ROOT)]
    return {**settings, "PYTHONPATH": ":".join(path)}


def run_refusal(refusal: Refusal, tell: Tell) -> None:
    """Start ranks that differ, which is to be refused."""
    with tempfile.TemporaryDirectory(prefix="rel-") as name, Sandbox(Path(name)) as sandbox:
        servers = Servers(refusal.layout, find_place(), sandbox, make_variables(Path(name)))
        tell(refusal.title, refusal.layout.title, "on", refuse(servers, refusal))


if __name__ == "__main__":
    sys.exit(main())
