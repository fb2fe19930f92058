"""Clients of a faulty server, in a process of their own.

They start as `python -m tests.support.reliability.client URL MODEL FILE CLIENTS`.

Each asks one prompt after the other and writes what it saw, a line of JSON for each answer. With `--hang-up` each asks
once, and half of them leave before they are answered.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from examples.tiny_tasks import Task, held_out

PATIENCE_SECONDS = 90.0
TOKENS = 12
PAUSE_SECONDS = 0.2  # after an error


class Seen(NamedTuple):
    """What a client saw: when it asked (seconds of the system's monotonic clock), for how long, and the outcome."""

    asked: float
    seconds: float
    outcome: str


def ask(url: str, model: str, task: Task, hang_up: float | None = None) -> str:
    """Return what a client sees of one request; with *hang_up* it leaves after so many seconds."""
    place = urlsplit(url)
    body = json.dumps({"model": model, "prompt": task.prompt, "max_tokens": TOKENS, "temperature": 0})
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if hang_up is not None:
            time.sleep(hang_up)
            return "hung up"
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            return f"HTTP {response.status} {_read_error(content)}".strip()
        return "right" if json.loads(content)["choices"][0]["text"] == task.answer else "wrong"
    except ConnectionRefusedError:
        return "connection refused"
    except (ConnectionError, http.client.HTTPException):
        return "connection closed"
    except TimeoutError:
        return f"no answer in {PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    finally:
        connection.close()


def _read_error(content: bytes) -> str:
    try:
        message: str = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return message.partition(".")[0][:80]


def read(file: Path) -> list[Seen]:
    """Return what clients have written so far."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Seen(*json.loads(line)) for line in lines]


def main() -> int:
    """Run clients until the input of this process ends, or, with `--hang-up`, until all have asked once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("clients", type=int)
    parser.add_argument("--hang-up", action="store_true")
    arguments = parser.parse_args()
    with arguments.file.open("a", buffering=1) as file:
        clients = [
            threading.Thread(target=_be_client, args=(arguments, number, file), daemon=True)
            for number in range(arguments.clients)
        ]
        for client in clients:
            client.start()
        if not arguments.hang_up:
            sys.stdin.read()
            os._exit(0)  # clients are still waiting for answers
        for client in clients:
            client.join()
    return 0


def _be_client(arguments: argparse.Namespace, number: int, file: Any) -> None:
    tasks = held_out(10)
    turn = number
    while True:
        start = time.monotonic()
        leaves = 0.02 * (number % 50) if arguments.hang_up and number % 2 else None
        outcome = ask(arguments.url, arguments.model, tasks[turn % len(tasks)], leaves)
        file.write(json.dumps(Seen(start, time.monotonic() - start, outcome)) + "\n")
        if arguments.hang_up:
            return
        turn += 1
        if outcome != "right":
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
