"""Send prompts to a prefill node, and each answer of it to a decode node, from a host that reaches both.

    python -m tests.benchmarks.prefill_client PREFILL_URL DECODE_URL REQUESTS TOKENS

prints the seconds until the last prompt was prefilled, and until the last answer was there, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.served_hosts import NAME

TIMEOUT_SECONDS = 600.0
PREFILL_HERE = {"do_remote_decode": True, "do_remote_prefill": False}


def main(prefill: str, decode: str, requests: int, tokens: int) -> None:
    """Send all at once, and print how long it took."""
    start = time.perf_counter()

    def send(seed: int) -> tuple[float, float]:
        prompt = [(seed * 7 + j * (1 + seed) + j * j) % 250 + 3 for j in range(tokens)]
        first = complete(prefill, prompt, PREFILL_HERE)
        prefilled = time.perf_counter() - start
        complete(decode, prompt, first["kv_transfer_params"])
        return prefilled, time.perf_counter() - start

    with ThreadPoolExecutor(requests) as pool:
        times = list(pool.map(send, range(requests)))
    prefilled, answered = (max(each) for each in zip(*times, strict=True))
    sys.stdout.write(json.dumps({"prefilled": prefilled, "answered": answered}))


def complete(url: str, prompt: Sequence[int], transfer: dict[str, Any]) -> dict[str, Any]:
    """Return a server's answer to a prompt of tokens."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "kv_transfer_params": transfer}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        found: dict[str, Any] = json.load(response)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]))
