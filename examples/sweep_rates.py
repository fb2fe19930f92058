"""Is `auto` ever slower than leaving steps unsplit? Two hosts, links of several rates, prompts of many lengths.

Makes two network namespaces on this machine (as root), serves a DeepSeek-V3 with random weights over both with an
unmodified vLLM, and for each rate calibrates and then times every prompt in turn with DBO_MODE off, auto and always,
and with off once more: by how much off differs from itself is what no figure here can be better than. Prints what
`auto` decided, its ratio to off, and how far the predicted step times are from the measured ones.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from network_hosts import Host
from two_hosts import add_host_arguments, run_on_hosts
from two_nodes import OPTIONS, join_tensor_parallel, let_workers_go_first

CONTROL = "off again"
RUNS = {"off": "off", "auto": "auto", "always": "always", CONTROL: "off"}  # what is timed -> its DBO_MODE
ORDERS = tuple(permutations(RUNS))  # what ran before leaves its mark on caches and on the link
STRIDE = 7  # through the orders, so that few turns have different ones
NO_LIMIT = "none"
MAX_REPEATS, ENOUGH = 60, 3.0  # short steps are disturbed most: they are repeated so often, or for so many seconds
TITLES = (
    f"{'tokens':>7}{'off':>11}{'always':>11}{'auto':>11}{'off/off':>9}{'off/auto':>10}  {'auto':<8}"
    f"{'predicted unsplit':>17}{'split':>11}{'errors':>11}"
)


@dataclass(frozen=True)
class Point:
    """One prompt length at one rate: seconds of each mode's steps, in turn, and what was predicted."""

    rate: str
    tokens: int
    seconds: dict[str, list[float]]  # by what was timed
    mode: str  # of the step with auto
    predicted: dict[str, float]  # seconds of a `unsplit` and of a `split` step

    def compare(self, run: str) -> float:
        """How much faster a run is than off: the median over pairs of the same turn."""
        return statistics.median(off / other for off, other in zip(self.seconds["off"], self.seconds[run], strict=True))

    def gain(self, mode: str) -> float:
        """By which share of the unsplit time a mode gains speed."""
        return statistics.median(self.seconds["off"]) / statistics.median(self.seconds[mode]) - 1

    def errors(self) -> dict[str, float]:
        """How far predictions are off, relative to what was measured: for unsplit and for split steps."""
        measured = {"unsplit": self.seconds["off"], "split": self.seconds["always"]}
        medians = {mode: statistics.median(seconds) for mode, seconds in measured.items()}
        return {mode: abs(self.predicted[mode] - medians[mode]) / medians[mode] for mode in self.predicted}


def main() -> int:
    """Run the whole sweep, or, inside a host, one node of it."""
    arguments = parse_arguments()
    if arguments.node is not None:
        return run_node(arguments)
    return run_on_hosts(Path(__file__), read_limit(arguments.rates[0]), arguments, {})


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", default=["50mbit", "200mbit", "1gbit", NO_LIMIT], help="of the link, in the words of tc"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--repeat", type=int, default=5, help="least runs of each mode, interleaved (default: 5)")
    parser.add_argument("--budget", type=float, default=40, help="seconds of each calibration (default: 40)")
    add_host_arguments(parser)
    return parser.parse_args()


def run_node(arguments: argparse.Namespace) -> int:
    """Drive the engine of both hosts, or follow."""
    longest = max(arguments.tokens) + 16
    options = {**OPTIONS, "max_model_len": longest, "max_num_batched_tokens": longest}
    options = join_tensor_parallel(arguments, options)
    from vllm import LLM

    from dbo_runtime.lab.calibrate.report import Report

    llm = LLM(arguments.model, disable_log_stats=True, use_tqdm_on_load=False, **options)
    let_workers_go_first()
    points = []
    set_rate(arguments.interfaces, NO_LIMIT)
    warm_up(llm, arguments.tokens)
    for rate in arguments.rates:
        set_rate(arguments.interfaces, rate)
        print(f"\nlink {rate}", flush=True)
        print(Report(**llm.collective_rpc("dbo_calibrate", args=("", arguments.budget))[0]), flush=True)
        print(TITLES)
        for tokens in arguments.tokens:
            points.append(measure_point(llm, rate, tokens, arguments.repeat))
            print(describe_point(points[-1]), flush=True)
    good = judge(points)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # an engine that meets the end of the interpreter prints a page about it
    return 0 if good else 1


def warm_up(llm: Any, tokens: list[int]) -> None:
    """Run all lengths, long ones first: memory that is touched for the first time takes several times as long."""
    for length in sorted(tokens, reverse=True):
        measure_point(llm, NO_LIMIT, length, repeat=1, enough=0.0)


def set_rate(interfaces: list[str], rate: str) -> None:
    """Limit the link from inside one of the hosts."""
    for end in interfaces:
        namespace, interface = end.split(":")
        Host(namespace, interface, "").set_rate(read_limit(rate))


def read_limit(rate: str) -> str | None:
    """Return the rate of a link, None if it has no limit."""
    return None if rate == NO_LIMIT else rate


def measure_point(llm: Any, rate: str, tokens: int, repeat: int, enough: float = ENOUGH) -> Point:
    """Time one prompt in every mode, in turn, after a round to warm up; short ones for *enough* seconds."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [(j * 7 + j * j) % 250 + 3 for j in range(tokens)]}
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {run: [] for run in RUNS}
    mode = ""
    predicted = llm.collective_rpc("dbo_predict", args=([tokens],))[0] or {}
    turn = 0
    while turn <= repeat or (turn <= MAX_REPEATS and sum(seconds["off"]) < enough):
        for run in ORDERS[turn * STRIDE % len(ORDERS)]:
            llm.collective_rpc("dbo_configure", args=({"DBO_MODE": RUNS[run]},))
            llm.generate([prompt], sampling, use_tqdm=False)
            step = llm.collective_rpc("dbo_last_step")[0]
            if run == "auto":
                mode = step["mode"]
            if turn:
                seconds[run].append(step["seconds"])
        turn += 1
    known = {name: predicted[name] for name in ("unsplit", "split") if name in predicted}
    return Point(rate, tokens, seconds, mode, known)


def describe_point(point: Point) -> str:
    """Return a row of the table."""
    medians = {mode: statistics.median(seconds) for mode, seconds in point.seconds.items()}
    cells = "".join(f"{medians[mode] * 1e3:>8.1f} ms" for mode in ("off", "always", "auto"))
    predicted = "".join(f"{seconds * 1e3:>8.1f} ms" for seconds in point.predicted.values())
    errors = "/".join(f"{error:.0%}" for error in point.errors().values())
    ratios = f"{point.compare(CONTROL):>8.2f}x{point.compare('auto'):>9.2f}x"
    return f"{point.tokens:>7}{cells}{ratios}  {point.mode:<8}{predicted:>28}{errors:>11}"


def judge(points: list[Point]) -> bool:
    """Print what the points come to; return whether auto never lost and kept what there was to gain."""
    worst, noise = (min(points, key=lambda point: point.compare(run)) for run in ("auto", CONTROL))
    print(f"\nworst off/auto: {worst.compare('auto'):.3f}x at {worst.tokens} tokens, {worst.rate}; 0.98 is asked for")
    print(f"worst off/off: {noise.compare(CONTROL):.3f}x at {noise.tokens} tokens, {noise.rate}: this machine's noise")
    worth = [point for point in points if point.gain("always") > 0.10]
    kept = min((point.gain("auto") / point.gain("always") for point in worth), default=1.0)
    print(f"always gains over 10 % at {len(worth)} points; auto keeps at least {kept:.0%} of it; 90 % is asked for")
    errors = [error for point in points for error in point.errors().values()]
    median = statistics.median(errors) if errors else 0.0
    print(f"predicted against measured step time: median error {median:.1%}; at most 15 % is asked for")
    return worst.compare("auto") >= 0.98 and kept >= 0.9 and median <= 0.15


if __name__ == "__main__":
    sys.exit(main())
