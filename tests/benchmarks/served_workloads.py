"""What clients ask of a server, and what `vllm bench serve` says of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from examples.two_nodes import find_vllm
from tests.benchmarks.measured_hosts import BenchError, Setting
from tests.benchmarks.served_hosts import LAST_LINES, NAME, Server

METRICS = {  # in vLLM's words
    "requests/s": "request_throughput",
    "tokens/s": "total_token_throughput",
    "TTFT mean, ms": "mean_ttft_ms",
    "TTFT median": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT mean, ms": "mean_tpot_ms",
    "TPOT median": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
}


@dataclass(frozen=True)
class Traffic:
    """Random requests.

    Attributes:
        after: what it is a smaller copy of.
        prompt, answer: tokens of each.
        rates: at which requests arrive, a second; `inf` for all at once.
    """

    name: str
    after: str
    prompt: int
    answer: int
    requests: int
    rates: tuple[str, ...]


LONG_PROMPTS, LONG_ANSWERS = (
    Traffic(
        "long-prompts",
        "vllm-ascend #941 (DeepSeek-R1 over 16 NPUs, 4096 tokens in, 1 out)",
        prompt=2000,
        answer=1,
        requests=12,
        rates=("0.5", "inf"),
    ),
    Traffic(
        "long-answers",
        "vllm-ascend #1353 (DeepSeek-R1 over 16 NPUs, 4096 tokens in, 1536 out, 1 request/s)",
        prompt=256,
        answer=96,
        requests=12,
        rates=("1", "inf"),
    ),
)
TRAFFIC = {traffic.name: traffic for traffic in (LONG_PROMPTS, LONG_ANSWERS)}


@dataclass(frozen=True)
class OfferedLoad:
    """A traffic at one rate."""

    traffic: Traffic
    rate: str


@dataclass(frozen=True)
class Run:
    """What one run of `vllm bench serve` found.

    Attributes:
        mode: how the server ran.
        figures: by vLLM's names.
        split, unsplit: steps of the server meanwhile; None where it does not count.
    """

    load: OfferedLoad
    mode: str
    figures: dict[str, float]
    split: int | None = None
    unsplit: int | None = None


def send(setting: Setting, server: Server, load: OfferedLoad) -> dict[str, float]:
    """Send the requests from the server's host with `vllm bench serve`, and return what it measured.

    Raises:
        BenchError: if it fails, or requests failed.
    """
    traffic, results = load.traffic, setting.directory / "served.json"
    results.unlink(missing_ok=True)  # vLLM would not say if it could not write
    words = [
        *(find_vllm(), "bench", "serve", "--backend=openai", f"--base-url={server.url}", f"--model={NAME}"),
        *(f"--tokenizer={setting.model}", "--dataset-name=random", f"--random-input-len={traffic.prompt}"),
        *(f"--random-output-len={traffic.answer}", f"--num-prompts={traffic.requests}", f"--request-rate={load.rate}"),
        *("--ignore-eos", "--temperature=0", "--num-warmups=1", "--seed=0", "--disable-tqdm", "--save-result"),
        *("--percentile-metrics=ttft,tpot", "--metric-percentiles=99"),
        *(f"--result-dir={results.parent}", f"--result-filename={results.name}"),
    ]
    done = subprocess.run(
        server.host.command(*words),
        env=setting.environment(0),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode or not results.exists():
        lines = "\n".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:])
        raise BenchError(f"`vllm bench serve` failed with {done.returncode}; its last lines:\n{lines}")
    return read_figures(json.loads(results.read_text()), traffic)


def read_figures(found: dict[str, Any], traffic: Traffic) -> dict[str, float]:
    """Return the metrics of a result that `vllm bench serve` has saved.

    Raises:
        BenchError: if not all requests were answered.
    """
    if found["completed"] != traffic.requests:
        raise BenchError(f"{traffic.name}: {found['completed']} of {traffic.requests} requests were answered.")
    return {name: float(found[name]) for name in METRICS.values()}


def find_median(runs: Sequence[Run], load: OfferedLoad, mode: str, metric: str) -> float | None:
    """Return the median of a metric over all runs of a mode; None without any."""
    values = [run.figures[metric] for run in runs if (run.load, run.mode) == (load, mode)]
    return median(values) if values else None
