"""Free ports of loopback for servers that bind them later."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

PORTS = range(10_000, 32_000)  # below those that Linux gives to clients, which come and go by the hundred


def find_free_ports(count: int = 10) -> int:
    """Return the first of *count* consecutive ports that are not in use.

    Another server may take one of them before it is bound; a client cannot. Not drawn by `random`, which vLLM seeds
    alike in each process that tests run in.
    """
    while True:
        first = secrets.choice(PORTS[:-count])
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
