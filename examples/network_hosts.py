"""Two hosts on one machine: network namespaces joined by a link of limited rate.

Needs iproute2, and root or a kernel that lets users make namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

# Bytes that a host gives to its end of the link at once. What does not fit into the link's bucket is cut up by the
# processor and received piece by piece. A network card does that by itself, and here it would be time for computation.
LARGEST_PACKET = 16384
HEADERS = 256
TOOLS_OF_ROOT = ("/usr/sbin", "/sbin")  # where `ip` and `tc` may be, which users do not have on their path
MAKE_ROOM = "mount -t tmpfs tmpfs /run"  # in which `ip netns` keeps its names
TRY_HOST = (
    "ip netns add try && ip netns exec try tc qdisc add dev lo root tbf rate 1mbit burst 20000b latency 1ms"
    " && ip link add try0 netns try type veth peer name try1 netns try"
)


class NetworkError(RuntimeError):
    """The hosts cannot be made; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return *words* as a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def environment(self, core: int) -> dict[str, str]:
        """Return the variables a vLLM node needs here, bound to one core."""
        return {
            **os.environ,
            "VLLM_HOST_IP": self.address,
            "GLOO_SOCKET_IFNAME": self.interface,
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            # Large tensors stay with the process: glibc would give each back to the kernel and fault the next one in,
            # which long attention spends much of its time on. vLLM preloads tcmalloc against that where it has it.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        }

    def set_rate(self, rate: str | None) -> None:
        """Limit what leaves through the interface to *rate*; None lifts the limit."""
        subprocess.run(self.command("tc", "qdisc", "del", "dev", self.interface, "root"), capture_output=True)
        if rate is not None:
            # A token bucket with room for 2 ms: large enough not to slow the rate itself, and small, so that what was
            # not sent while the link was idle does not make the link look faster than it is.
            burst = max(LARGEST_PACKET + HEADERS, int(read_rate(rate) / 8 * 0.002))
            _run(*self.command("tc", "qdisc", "add", "dev", self.interface, "root", "tbf", "rate", rate,
                               "burst", f"{burst}b", "latency", "400ms"))  # fmt: skip


def read_rate(rate: str) -> float:
    """Return the bits a second that tc's words for a rate, such as `200mbit`, stand for.

    Raises:
        NetworkError: if they stand for none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    if found is None or not float(found[1]):
        raise NetworkError(f"{rate!r} is no rate of a link; write it like 200mbit, 2.5gbit or 800kbit.")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


class TwoHosts:
    """A pair of hosts for the length of a `with` block; they are removed at its end whatever happens in it.

    Args:
        rate: of the link in either direction, in the words of tc, such as "200mbit"; None for no limit.
        suffix: of their names, a few letters, where a process has several pairs.
    """

    def __init__(self, rate: str | None = "200mbit", suffix: str = "") -> None:
        self._rate = rate
        name = f"dbo{os.getpid()}{suffix}"
        self.hosts = tuple(Host(f"{name}-{end}", f"{name}{end}", f"10.77.0.{end}") for end in (1, 2))

    def __enter__(self) -> tuple[Host, Host]:
        check_requirements()
        first, second = self.hosts
        try:
            for host in self.hosts:
                _run("ip", "netns", "add", host.namespace)
                _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _run("ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth",
                 "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
            for host in self.hosts:
                _run("ip", "-n", host.namespace, "link", "set", host.interface, "gso_max_size", str(LARGEST_PACKET))
                _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _run("ip", "-n", host.namespace, "link", "set", host.interface, "up")
                host.set_rate(self._rate)
        except BaseException:
            self._remove()
            raise
        return first, second

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for host in self.hosts:
            _end_all_in(host.namespace)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def become_root_of_namespaces() -> None:
    """Run this program again as root of user, network and mount namespaces of its own; return if that cannot be.

    There, and nowhere else, it may make hosts. They vanish with its last process.
    """
    os.environ["PATH"] += os.pathsep + os.pathsep.join(TOOLS_OF_ROOT)
    if os.geteuid() == 0 or shutil.which("unshare") is None:
        return
    shell = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]
    if subprocess.run([*shell, f"{MAKE_ROOM} && {TRY_HOST}"], capture_output=True).returncode == 0:
        os.execvp(shell[0], [*shell, f'{MAKE_ROOM} && exec "$@"', "sh", sys.executable, *sys.argv])


def check_requirements() -> None:
    """Raise NetworkError if hosts cannot be made here."""
    if os.geteuid() != 0:
        raise NetworkError(
            "Two hosts on one machine need root, or a kernel that lets users make network namespaces (`unshare -Urn`)."
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found: install iproute2.")


def _end_all_in(namespace: str) -> None:
    """End what still runs there: it would go on without a network, and without anyone who knows of it."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
