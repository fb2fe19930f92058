"""How the tiny model is spread over ranks and hosts, and the servers' command lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from examples.network_hosts import Host
from examples.two_nodes import find_vllm
from tests.support.ports import find_free_ports
from tests.support.vllm.engines import TINY

OPTIONS = (
    "--dtype=float32",
    "--attention-backend=CPU_MLA",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-batched-tokens=1024",
    f"--kv-cache-memory-bytes={1 << 26}",
    "--no-enable-prefix-caching",
    "--distributed-executor-backend=mp",
)
LOOPBACK = "127.0.0.1"


class Layout(NamedTuple):
    """TP=2 or DP=2 (`parallel` is "tensor" or "data"), with a server for both ranks or (`nodes` = 2) one for each.

    Two servers are on a host each, or both on this one (`hosts` = 1).
    """

    parallel: str
    nodes: int = 1
    hosts: int = 1

    @property
    def title(self) -> str:
        """Say it for readers."""
        hosts = {(1, 1): "one host", (2, 1): "two servers on one host", (2, 2): "two hosts"}[self.nodes, self.hosts]
        return f"{'TP=2' if self.parallel == 'tensor' else 'DP=2, experts'}, {hosts}"


class Node(NamedTuple):
    """A server to start: its words and variables."""

    words: Sequence[str]
    variables: Mapping[str, str]


class Place(NamedTuple):
    """Where servers listen and ranks meet: ports, which stay the same from one start to the next, and hosts, if any."""

    port: int
    meeting: int
    hosts: tuple[Host, ...] = ()

    @property
    def address(self) -> str:
        """Return that of the first host."""
        return self.hosts[0].address if self.hosts else LOOPBACK

    @property
    def url(self) -> str:
        """Return where the first server listens."""
        return f"http://{self.address}:{self.port}"

    def reach(self, node: int, *words: str) -> list[str]:
        """Return a command that runs on a node's host."""
        return self.hosts[node].command(*words) if self.hosts else list(words)


def find_place(hosts: tuple[Host, ...] = ()) -> Place:
    """Return free ports of loopback, or any of hosts that were just made."""
    first = find_free_ports(4)
    return Place(first, first + 1, hosts)


def list_nodes(layout: Layout, place: Place, variables: Mapping[str, str]) -> list[Node]:
    """Return what to start, the first node first."""
    words = [find_vllm(), "serve", str(TINY), f"--host={place.address}", f"--port={place.port}", *OPTIONS]
    return [
        Node([*words, *_spread(layout, place, number)], {**_address(place, number), **variables})
        for number in range(layout.nodes)
    ]


def _spread(layout: Layout, place: Place, number: int) -> list[str]:
    headless = ["--headless"] if number else []
    if layout.parallel == "tensor":
        meeting = [f"--master-addr={place.address}", f"--master-port={place.meeting}"]
        nodes = [f"--nnodes={layout.nodes}", f"--node-rank={number}", *meeting, *headless]
        return ["--tensor-parallel-size=2", *(nodes if layout.nodes > 1 else [])]
    words = ["--data-parallel-size=2", "--enable-expert-parallel"]
    if layout.nodes == 1:
        return words
    meeting = [f"--data-parallel-address={place.address}", f"--data-parallel-rpc-port={place.meeting}"]
    start = [f"--data-parallel-start-rank={number}"] if number else []
    return [*words, "--data-parallel-size-local=1", *meeting, *start, *headless]


def _address(place: Place, number: int) -> dict[str, str]:
    core = sorted(os.sched_getaffinity(0))[-number]
    if place.hosts:
        return place.hosts[number].environment(core)
    return {**os.environ, "VLLM_HOST_IP": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
