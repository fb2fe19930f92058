"""`vllm serve` over two hosts, for the length of a `with` block, and words with it from the first of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.network_hosts import Host
from examples.process_group import Program, start_together
from examples.two_nodes import OPTIONS, find_server, share_tensors
from tests.benchmarks.measured_hosts import BenchError, Setting

PORT = 8000
STARTS_WITHIN = 600.0  # seconds
LAST_LINES = 25  # of a log, when a server fails
ENGINE = "VLLM::EngineCor"  # as vLLM names the process, of which Linux keeps 15 letters
NAME = "dbo"  # that it serves the model by
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

# Runs on the host, for only there the server can be reached; says what the server answers.
ASK = """
import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"})
sys.stdout.write(urllib.request.urlopen(request, timeout=60).read().decode())
"""

# Fails where somebody listens, and not where connections of an earlier server are still being wound up.
BIND = """
import socket, sys
own = socket.socket()
own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
own.bind((sys.argv[1], int(sys.argv[2])))
"""


@dataclass(frozen=True)
class Server:
    """A server, reached from its own host."""

    host: Host
    port: int = PORT

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host.address}:{self.port}"

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method on all workers, and return the first one's result.

        Raises:
            BenchError: if the server refuses.
        """
        answer = self._ask("/collective_rpc", json.dumps({"method": method, "args": arguments}))
        return json.loads(answer)["results"][0]

    def answers(self) -> bool:
        """Whether it is up."""
        try:
            self._ask("/health")
        except BenchError:
            return False
        return True

    def _ask(self, path: str, body: str = "") -> str:
        words = self.host.command(sys.executable, "-c", ASK, self.url + path, body)
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"{path} of the server: {(done.stderr.splitlines() or ['no answer'])[-1]}")
        return done.stdout


@contextmanager
def serve(setting: Setting, options: Mapping[str, Any] = NO_OPTIONS, **settings: str) -> Iterator[Server]:
    """Start a server on the first host and its follower on the second, and wait until they answer.

    Args:
        setting: where, and which model.
        options: of vLLM, in place of those of `two_nodes.OPTIONS`.
        settings: variables of both.

    Raises:
        BenchError: if they do not, with the last lines of their logs, or if the port is in use.
    """
    first = setting.hosts[0]
    check_port(first)
    logs = [setting.directory / f"server-{node}.log" for node in (0, 1)]
    with start_together(
        *(make_program(setting, node, log, options, settings) for node, log in enumerate(logs))
    ) as nodes:
        server = Server(first)
        wait_until_up(server, nodes, logs)
        let_drivers_give_way(nodes)
        yield server


def make_program(
    setting: Setting, node: int, log: Path, options: Mapping[str, Any], settings: Mapping[str, str]
) -> Program:
    """Return a node's server; prompts are not cached, because every run sends the same ones."""
    shared = {**share_tensors(node, setting.master), "served_model_name": NAME}
    address = (f"--host={setting.hosts[0].address}", f"--port={PORT}") if node == 0 else ("--headless",)
    words = find_server(str(setting.model), {**OPTIONS, **options, **shared}, "--no-enable-prefix-caching", *address)
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **settings}
    return Program(setting.hosts[node].command(*words), setting.environment(node, **variables), log)


def check_port(host: Host) -> None:
    """Raise BenchError if something listens already where the server is to."""
    words = host.command(sys.executable, "-c", BIND, host.address, str(PORT))
    if subprocess.run(words, capture_output=True).returncode:
        raise BenchError(f"port {PORT} of {host.address} is in use.")


def wait_until_up(
    server: Server, nodes: list[subprocess.Popen[bytes]], logs: list[Path], patience: float = STARTS_WITHIN
) -> None:
    """Wait for a server.

    Raises:
        BenchError: if a node ends before, or the server is not up after *patience* seconds.
    """
    deadline = time.monotonic() + patience
    while not server.answers():
        for node, log in zip(nodes, logs, strict=True):
            if node.poll() is not None:
                raise BenchError(f"a server has ended with {node.returncode}; its last lines:\n{read_end(log)}")
        if time.monotonic() > deadline:
            ends = "\n".join(map(read_end, logs))
            raise BenchError(f"the server was not up within {patience:.0f} s; last lines of both hosts:\n{ends}")
        time.sleep(1)


def let_drivers_give_way(nodes: list[subprocess.Popen[bytes]]) -> None:
    """Let workers go first, as `two_nodes.let_workers_go_first` does: here the engine is a process of the server."""
    groups = {node.pid for node in nodes}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            is_ours = os.getpgid(int(process.name)) in groups
            if is_ours and (process / "comm").read_text().startswith(ENGINE):
                os.setpriority(os.PRIO_PROCESS, int(process.name), 19)


def read_end(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
