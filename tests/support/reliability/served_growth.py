"""Serve a tiny model under mixed load for a while, and measure what its processes hold."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.reliability.process_sizes import Sizes, measure
from tests.support.vllm.engine import EXTENSION
from tests.support.vllm.engines import TINY
from tests.support.vllm.server import Server, serve

PERIOD_SECONDS = 10.0  # between two samples
WARM_SHARE = 1 / 6  # of the time, in which sizes may grow: the first 5 of 30 minutes
PROMPTS, LONGEST_PROMPT, LONGEST_ANSWER = 8, 300, 48
VOCABULARY = range(3, 320)  # of the tiny model's tokenizer, without special tokens
HANG_UP_SHARE, HANG_UP_SECONDS = 0.1, 0.05  # of requests whose client does not wait for the answer
OPTIONS = ("--tensor-parallel-size=2", f"--worker-extension-cls={EXTENSION}")
OURS = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always", "DBO_CALIBRATE": "1"}
SHARED = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}


class Growth(NamedTuple):
    """How a size went on after the warm-up.

    Attributes:
        first: median of the first quarter of the samples.
        last: median of the last quarter.
        slope: of a line through all of them, each minute (least squares).
    """

    first: float
    last: float
    slope: float


@dataclass(frozen=True)
class ServedGrowth:
    """What a server held while it was under load.

    Attributes:
        minutes: how long.
        requests: that were sent.
        split: steps that were split.
        samples: seconds since the start, and sizes.
        caches: of the first rank: entries, and how many there may be; empty without overlap.
    """

    minutes: float
    requests: int
    split: int
    samples: list[tuple[float, Sizes]]
    caches: dict[str, Any]

    def measure(self, name: str) -> Growth:
        """Return how a field of `Sizes` went on after the warm-up."""
        warm = [(seconds, getattr(sizes, name)) for seconds, sizes in self.samples]
        kept = [(seconds / 60, value) for seconds, value in warm if seconds >= self.minutes * 60 * WARM_SHARE]
        quarter = max(len(kept) // 4, 1)
        values = [value for _, value in kept]
        slope, _ = statistics.linear_regression(*zip(*kept, strict=True)) if len(kept) > 1 else (0.0, 0.0)
        return Growth(statistics.median(values[:quarter]), statistics.median(values[-quarter:]), slope)


def serve_both(minutes: float, folder: Path) -> dict[str, ServedGrowth]:
    """Serve with and without overlap, at the same time, so that both have the same machine."""
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(serve_mixed, minutes, folder / "overlap.log", **OURS)
        plain = pool.submit(serve_mixed, minutes, folder / "plain.log")
        return {"with overlap": ours.result(), "vLLM alone": plain.result()}


def serve_mixed(minutes: float, log: Path, **settings: str) -> ServedGrowth:
    """Serve the tiny model at TP=2, with one client that sends random requests."""
    with serve(TINY, log, *OPTIONS, **SHARED, **settings) as server:
        sent, ends = [0], threading.Event()
        client = threading.Thread(target=_send_all, args=(server, sent, ends))
        client.start()
        try:
            samples = _sample(server.process, minutes)
        finally:
            ends.set()
            client.join()
        steps = server.scrape("vllm:dbo_steps_total") if settings else {}
        split = sum(int(count) for labels, count in steps.items() if 'mode="split"' in labels)
        return ServedGrowth(minutes, sent[0], split, samples, _ask_caches(server) if settings else {})


def _sample(process: int, minutes: float) -> list[tuple[float, Sizes]]:
    samples, start = [], time.monotonic()
    while (now := time.monotonic() - start) < minutes * 60:
        samples.append((now, measure(process)))
        time.sleep(min(PERIOD_SECONDS, minutes * 60 / 20))
    return samples


def _send_all(server: Server, sent: list[int], ends: threading.Event) -> None:
    chance = random.Random(1)
    while not ends.is_set():
        with suppress(TimeoutError, urllib.error.URLError, ConnectionError):
            _send(server, _make_request(chance), chance.random() < HANG_UP_SHARE)
        sent[0] += 1


def _make_request(chance: random.Random) -> dict[str, Any]:
    prompts = [_make_prompt(chance) for _ in range(chance.randint(1, PROMPTS))]
    return {
        "prompt": prompts,
        "max_tokens": _draw_length(chance, LONGEST_ANSWER),
        "ignore_eos": chance.random() < 0.8,
        "temperature": chance.choice((0.0, 0.0, 1.0)),
        "n": chance.choice((1, 1, 1, 2)),
        "logprobs": chance.choice((None, None, 3)),
    }


def _make_prompt(chance: random.Random) -> list[int]:
    """Return a random prompt; half of them begin alike, so that the prefix cache is hit."""
    tokens = chance.choices(VOCABULARY, k=_draw_length(chance, LONGEST_PROMPT))
    return [*VOCABULARY[:64], *tokens] if chance.random() < 0.5 else tokens


def _draw_length(chance: random.Random, longest: int) -> int:
    return max(round(longest * 50 ** -chance.random()), 1)


def _send(server: Server, body: dict[str, Any], hangs_up: bool) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        data=json.dumps({"model": str(server.model), **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=HANG_UP_SECONDS if hangs_up else 300) as response:
        response.read()


def _ask_caches(server: Server) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/collective_rpc",
        data=json.dumps({"method": "dbo_statistics"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        results: Sequence[dict[str, Any]] = json.load(response)["results"]
    caches: dict[str, Any] = results[0]["caches"]
    return caches
