"""Requests that a server schedules when all have come, so that it makes the same batches of the same requests.

    python -m tests.benchmarks.queued_requests URL < requests.json

sends them from the server's host, and waits for the answers.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.measured_hosts import BenchError
from tests.benchmarks.served_hosts import NAME, Server

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds, for an answer
VOCABULARY = range(3, 320)  # of the tiny model's tokenizer, without special tokens
LONGEST_PROMPT, LONGEST_ANSWER = 320, 32  # tokens


def make_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random completion requests; lengths are even in their logarithm, so that most are short."""
    chance = random.Random(seed)
    return [
        {
            "model": NAME,
            "prompt": chance.choices(VOCABULARY, k=draw_length(chance, LONGEST_PROMPT)),
            "max_tokens": draw_length(chance, LONGEST_ANSWER),
            "ignore_eos": True,
            "temperature": 0,
        }
        for _ in range(count)
    ]


def draw_length(chance: random.Random, longest: int) -> int:
    """Return a number of tokens between a twentieth of the longest and that."""
    return round(longest * 20 ** -chance.random())


def send(server: Server, requests: list[dict[str, Any]]) -> None:
    """Send requests to a server from its own host, and wait for the answers.

    Raises:
        BenchError: if one of them is refused.
    """
    words = server.host.command(sys.executable, "-m", __name__, server.url)
    done = subprocess.run(words, cwd=ROOT, input=json.dumps(requests), capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"requests to the server: {(done.stderr.splitlines() or ['no answer'])[-1]}")


def main() -> None:
    """Send the requests on standard input."""
    address = urlsplit(sys.argv[1]).netloc
    finish(begin(address, "/pause?mode=keep"))
    waiting = [begin(address, "/v1/completions", json.dumps(body)) for body in json.load(sys.stdin)]
    finish(begin(address, "/resume"))
    for connection in waiting:
        finish(connection)


def begin(address: str, path: str, body: str = "") -> HTTPConnection:
    """Send a request on a connection of its own, so that none waits for the answer to another."""
    connection = HTTPConnection(address, timeout=PATIENCE)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection


def finish(connection: HTTPConnection) -> None:
    """Wait for the answer; exit with what the server says if it refuses."""
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != 200:
        sys.exit(f"{response.status} {text}")


if __name__ == "__main__":
    main()
