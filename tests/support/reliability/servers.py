"""The real servers of one layout in a sandbox: started, asked under load, watched until they have ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.page import ROOT
from tests.support.reliability.client import Seen, read
from tests.support.reliability.layouts import Layout, Place, list_nodes
from tests.support.reliability.sandbox import Sandbox
from tests.support.reliability.server_plugin import FOLDER, Order
from tests.support.vllm.engines import TINY

STARTS_WITHIN = 600.0  # seconds, on a machine that is busy with other things
WARM_ANSWERS = 40  # before a fault
CLIENTS = 8
LINE_LETTERS = 360  # of a log, on the page
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
# Where a message between vLLM's processes is late, it gives up after this, not after 300 s.
PATIENCE = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "40"}
ON = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always", "DBO_MIN_TOKENS": "2"}
OFF = {"VLLM_ASCEND_ENABLE_DBO": "0"}
_ERROR = re.compile(r"\b(?:\w+Error|\w+Exception|Exception): .+")
_REFUSAL = re.compile(r"\bConfigError: .+")
_OURS = re.compile(r"(?:ERROR|WARNING) \S+ \S+ \[dbo_runtime\] (.+)")
_OWN_PATH = re.compile(rf"{re.escape(str(ROOT))}/|/\S*/rel-\w+/")
_BUILD_PATH = re.compile(r"\[/\S+/(\w+\.cc:\d+)\]")  # of the machine that built torch


class NotUpError(RuntimeError):
    """A server did not come up."""


class Servers:
    """All servers of a layout.

    Args:
        layout: how ranks are spread.
        place: where they listen.
        sandbox: in which they live.
        variables: for all of them.
    """

    def __init__(self, layout: Layout, place: Place, sandbox: Sandbox, variables: Mapping[str, str]) -> None:
        self._layout = layout
        self._place = place
        self.sandbox = sandbox
        self._variables = variables
        self.python_path = variables.get("PYTHONPATH", "")
        self.faults = sandbox.folder / "faults"
        self.faults.mkdir(exist_ok=True)
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._is_given_up = False
        self._clients: list[subprocess.Popen[bytes]] = []
        self._answers = sandbox.folder / "answers"

    def start(self, meanwhile: Callable[[], None] | None = None) -> float:
        """Start them and wait until they answer, doing *meanwhile* again and again; return the seconds that took.

        Raises:
            NotUpError: if a server ends before, or none answers.
        """
        begin = time.monotonic()
        self.launch()
        while True:
            if meanwhile is not None:
                meanwhile()
            if any(node.poll() is not None for node in self.nodes):
                raise NotUpError("a server has ended")
            if self._ask_once() == "right":
                return time.monotonic() - begin
            if time.monotonic() > begin + STARTS_WITHIN:
                raise NotUpError(f"no answer within {STARTS_WITHIN:.0f} s")
            time.sleep(0.5)

    def launch(self, each: Mapping[int, Mapping[str, str]] = MappingProxyType({})) -> None:
        """Start them; *each* has variables of single nodes.

        Raises:
            NotUpError: after `give_up`.
        """
        if self._is_given_up:
            raise NotUpError("the run is interrupted")
        for file in self.faults.iterdir():
            file.unlink()
        common = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONUNBUFFERED": "1"}
        variables = {**common, **PATIENCE, **self.sandbox.environment, FOLDER: str(self.faults), **self._variables}
        self.nodes = []
        for number, node in enumerate(list_nodes(self._layout, self._place, variables)):
            words = self.sandbox.enter(*self._place.reach(number, *node.words))
            with self._get_log(number).open("ab") as log:
                own = {**node.variables, **each.get(number, {})}
                self.nodes.append(
                    subprocess.Popen(words, env=own, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
                )

    def give_up(self) -> None:
        """End them, and never start them again."""
        self._is_given_up = True
        self.sandbox.end_all()

    def load(self, clients: int = CLIENTS) -> None:
        """Let clients ask without end, and return when they have had some answers."""
        self._answers.unlink(missing_ok=True)
        self._clients.append(self._start_clients(str(clients)))
        deadline = time.monotonic() + STARTS_WITHIN
        while len(self.read_answers()) < WARM_ANSWERS:
            if time.monotonic() > deadline:
                raise NotUpError("the load got no answers")
            time.sleep(0.1)

    def hang_up(self, clients: int) -> None:
        """Let so many more clients ask at once, half of which leave before they are answered; wait for the others."""
        with self._start_clients(str(clients), "--hang-up") as leaving:  # which closes its input
            leaving.wait()

    def stop_load(self) -> None:
        """End the clients."""
        for client in self._clients:
            client.communicate()  # it sees the end of its input
        self._clients.clear()

    def read_answers(self) -> list[Seen]:
        """Return what clients have seen since `load`."""
        return read(self._answers)

    def order(self, act: str, lane: str = "compute", rank: int = 1) -> int:
        """Plant a fault and return the id of the process that has reached it, in a split step where there are any."""
        for file in self.faults.iterdir():
            file.unlink()
        target = self.faults / f"{rank}-{lane}"
        draft = target.with_suffix(".new")
        draft.write_text(json.dumps(Order(act, lane, rank)))
        draft.rename(target)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for file in self.faults.glob("reached-*"):
                return int(file.name.partition("-")[2])
            time.sleep(0.005)
        raise NotUpError(f"no op on {lane} of rank {rank} came by")

    def go_on(self) -> None:
        """Let an op that holds go on."""
        (self.faults / "go").touch()

    def watch_end(self, patience: float) -> tuple[float | None, dict[int, str]]:
        """Wait until all processes are gone; return the seconds, or None and those that are left after *patience*."""
        begin = time.monotonic()
        while True:
            for node in self.nodes:
                node.poll()
            left = self.sandbox.find_processes()
            if not left:
                return time.monotonic() - begin, {}
            if time.monotonic() > begin + patience:
                return None, left
            time.sleep(0.1)

    def measure_log(self) -> list[int]:
        """Return how long the logs are, for `read_log`."""
        return [self._get_log(node).stat().st_size for node in range(self._layout.nodes)]

    def read_log(self, since: list[int]) -> str:
        """Return what servers have logged since `measure_log`."""
        texts = [self._get_log(node).read_bytes()[start:] for node, start in enumerate(since)]
        return "\n".join(text.decode(errors="replace") for text in texts)

    def _get_log(self, node: int) -> Path:
        log = self.sandbox.folder / f"node-{node}.log"
        log.touch()
        return log

    def _start_clients(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.reliability.client", self._place.url, str(TINY)]
        command += [str(self._answers), *words]
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(self._place.reach(0, *command), cwd=ROOT, env=own, stdin=subprocess.PIPE)

    def _ask_once(self) -> str:
        code = (
            "import sys; from tests.support.reliability.client import ask; from examples.tiny_tasks import held_out\n"
            "print(ask(sys.argv[1], sys.argv[2], held_out(1)[0]))"
        )
        words = self._place.reach(0, sys.executable, "-c", code, self._place.url, str(TINY))
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()


def find_cause(log: str) -> str:
    """Return the line of a log that says what went wrong first: a refusal, what else we say, or the first error."""
    theirs = "\n".join(
        line for line in log.splitlines() if "[dbo_runtime]" not in line
    )  # ours name errors that are patched
    for pattern, text in ((_REFUSAL, log), (_OURS, log), (_ERROR, theirs)):
        found = pattern.search(text)
        if found:
            return _tidy(found[found.lastindex or 0])
    return ""


def find_warnings(log: str) -> str:
    """Return all that dbo_runtime warns of in a log."""
    return "; ".join(dict.fromkeys(_tidy(line) for line in _OURS.findall(log)))


def _tidy(line: str) -> str:
    """Return a line without paths of this machine."""
    return _shorten(_BUILD_PATH.sub(r"[\1]", _OWN_PATH.sub("", line)).strip())


def _shorten(line: str) -> str:
    """Leave out the middle of a long line: its end says where."""
    return line if len(line) <= LINE_LETTERS else f"{line[: LINE_LETTERS // 2]} ... {line[-LINE_LETTERS // 2 :]}"
