"""One of two nodes that are measured: `bench_two_hosts.py` starts it on either host.

The first leads: it sets the link's rate, tells how far things are, and writes down what came of it. With data
parallelism each node drives an engine of its own, and both do the same in the same order; otherwise the second follows.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from itertools import compress, permutations
from pathlib import Path
from typing import Any

from examples.compare_modes import gather
from examples.network_hosts import Host
from examples.two_nodes import OPTIONS, join_data_parallel, join_tensor_parallel, let_workers_go_first
from tests.benchmarks.two_hosts_cells import MODES, NANO, NO_LIMIT, OFF, PLANNED, Cell, StepFigures
from tests.benchmarks.workloads import Workload, read_workload, run

ORDERS = tuple(permutations(MODES))  # what ran before leaves its mark on caches and on the link
STRIDE = 5  # through the orders, so that each mode is soon in each place
TIMELINES = 7  # of each mode that splits


def main() -> int:
    """Be a node."""
    arguments = parse_arguments()
    join = join_tensor_parallel if arguments.parallel == "tensor" else join_data_parallel
    # Each run repeats the prompts of the last one, and is to compute them.
    extra = {"attention_backend": arguments.attention_backend, "enable_prefix_caching": False}
    options = join(arguments, {**OPTIONS, **extra})
    from vllm import LLM

    llm = LLM(arguments.model, disable_log_stats=True, use_tqdm_on_load=False, **options)
    let_workers_go_first()
    cells = list(measure_all(llm, arguments))
    if arguments.node == 0:
        arguments.results.write_text(json.dumps([cell.as_dict() for cell in cells]))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # an engine that meets the end of the interpreter prints a page about it
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read what the bench says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=int, required=True)
    for name in ("--parallel", "--model", "--master"):
        parser.add_argument(name, required=True)
    parser.add_argument("--attention-backend", required=True)
    parser.add_argument("--interfaces", nargs=2, required=True)
    parser.add_argument("--rates", nargs="+", required=True)
    parser.add_argument("--workloads", nargs="+", required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--results", type=Path, required=True)
    return parser.parse_args()


def measure_all(llm: Any, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield every workload at every rate."""
    from tqdm import tqdm

    leads = arguments.node == 0
    workloads = [read_workload(name) for name in arguments.workloads]
    with tqdm(total=len(arguments.rates) * len(workloads), disable=not leads, unit="cell", file=sys.stderr) as bar:
        for rate in arguments.rates:
            if leads:
                set_rate(arguments.interfaces, rate)
            gather(llm, [])  # until the first has set the rate
            bar.set_description(f"{arguments.parallel}, {rate}, calibration")
            llm.collective_rpc("dbo_calibrate", args=("", arguments.budget))
            for workload in workloads:
                bar.set_description(f"{arguments.parallel}, {rate}, {workload.name}")
                yield (cell := measure(llm, arguments.parallel, rate, workload, arguments.repeat))
                bar.update()
                if leads:
                    bar.write(describe(cell), file=sys.stderr)  # so that an interruption does not lose it


def set_rate(interfaces: list[str], rate: str) -> None:
    """Limit both ends of the link from inside one of the hosts."""
    for end in interfaces:
        namespace, interface = end.split(":")
        Host(namespace, interface, "").set_rate(None if rate == NO_LIMIT else rate)


def measure(llm: Any, parallel: str, rate: str, workload: Workload, repeat: int) -> Cell:
    """Time each mode *repeat* times in turn, after a round to warm up, and look into some steps."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES if mode != NANO or has_nano_batches(llm, workload)}
    answers = set()
    for turn in range(repeat + 1):
        for mode in filter(seconds.__contains__, ORDERS[turn * STRIDE % len(ORDERS)]):
            taken, tokens = time_once(llm, workload, mode)
            answers.add(tuple(tokens))
            if turn:
                seconds[mode].append(taken)
    steps: dict[str, list[StepFigures]] = {mode: [] for mode in seconds if mode != OFF}
    for _ in range(TIMELINES):
        for mode, kept in steps.items():
            llm.collective_rpc("dbo_configure", args=(MODES[mode],))
            run(llm, workload, ask=True)
            timelines = [timeline for timeline in llm.collective_rpc("dbo_timeline") if timeline is not None]
            kept += gather(llm, [look_into(timeline) for timeline in timelines])
    same = all(gather(llm, [len(answers) == 1]))
    return Cell(parallel, rate, workload.name, seconds, steps, same, predict(llm, workload))


def has_nano_batches(llm: Any, workload: Workload) -> bool:
    """Return whether steps are cut into nano-batches. Of a model without an adapter they are not."""
    llm.collective_rpc("dbo_configure", args=(MODES[NANO],))
    before = count_steps(llm)[1]
    run(llm, workload)
    return count_steps(llm)[1] > before


def predict(llm: Any, workload: Workload) -> float | None:
    """Return the predicted speed-up of the best split of a prefill; None for other steps."""
    if workload.answer > 1:
        return None
    found = llm.collective_rpc("dbo_predict", args=(list(workload.prompts),))[0]
    return found["unsplit"] / found["split"] if found and found["split"] else None  # hasty costs may predict nothing


def time_once(llm: Any, workload: Workload, mode: str) -> tuple[float, list[tuple[int, ...]]]:
    """Return seconds and tokens, once it is sure that the steps were those of the workload, and split if they had to.

    A late prompt that did not share a step with decodes would have taken one more. What is planned is left to the
    planner.
    """
    llm.collective_rpc("dbo_configure", args=(MODES[mode],))
    before = count_steps(llm)
    start = time.perf_counter()
    tokens = run(llm, workload)
    seconds = time.perf_counter() - start
    unsplit, split = (now - then for now, then in zip(count_steps(llm), before, strict=True))
    expected = (workload.steps, 0) if mode == OFF else (0, workload.steps)
    if unsplit + split != workload.steps or (mode != PLANNED and (unsplit, split) != expected):
        raise RuntimeError(
            f"{workload.name}, {mode}: {unsplit} unsplit and {split} split steps instead of {expected[0]} and "
            f"{expected[1]}; {llm.collective_rpc('dbo_statistics')[0]}"
        )
    return seconds, tokens


def count_steps(llm: Any) -> tuple[int, int]:
    """Return how many steps ran as the model itself runs them, and how many with overlap of any kind."""
    statistics = llm.collective_rpc("dbo_statistics")[0]
    ran = (statistics[mode] for mode in ("split", "nano", "concurrent"))
    return sum(statistics["declined"].values()), sum(ran)


def look_into(kept: dict[str, Any]) -> StepFigures:
    """Return the figures of a timeline that a worker kept."""
    from dbo_runtime.observe.timeline import Timeline

    timeline = Timeline.from_dict(kept)
    parts = 1 + max(span.micro_batch for span in timeline.spans)
    numbers = [find_nano_batch(span.op) for span in timeline.spans]
    joint = [span.lane == "compute" and number is None for span, number in zip(timeline.spans, numbers, strict=True)]
    seconds = sum(span.end - span.start for span in compress(timeline.spans, joint))
    return StepFigures(
        timeline.duration,
        timeline.busy("comm"),
        timeline.overlap("compute", "comm"),
        timeline.bound,
        parts,
        1 + max((number for number in numbers if number is not None), default=0),
        seconds / timeline.busy("compute"),
    )


def find_nano_batch(op: str) -> int | None:
    """Return the number of the nano-batch in an op's name, such as `L3.mlp#1`; None if the op is not of one."""
    _, mark, number = op.rpartition("#")
    return int(number) if mark else None


def describe(cell: Cell) -> str:
    """Return one line."""
    times = ", ".join(f"{mode} {cell.median(mode):.3f} s" for mode in cell.seconds)
    return f"{cell.parallel}, {cell.rate}, {cell.workload}: {times}"


if __name__ == "__main__":
    sys.exit(main())
