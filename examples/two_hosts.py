"""Dual-batch overlap where there is something to hide: two hosts, one slow link, one model over both.

Makes two network namespaces on this machine (as root), joins them at --rate, serves a DeepSeek-V3 with random weights
over both with an unmodified vLLM, and times prefills three ways in turn: unsplit, split without overlap, and split with
overlap. All three give the same tokens; that is checked.

The hosts share each layer and reduce what comes out (--parallel tensor), or each has prompts of its own and half of the
experts, to which tokens are dispatched (data-expert).
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from compare_modes import compare_modes, draw_timeline, gather
from network_hosts import Host, NetworkError, TwoHosts
from process_group import Program, start_together, wait_for_first
from two_nodes import PARALLEL, join_data_parallel, join_tensor_parallel, let_workers_go_first

DRAWN = {"tensor": (1, 1900), "data-expert": (4, 500)}  # prompts and tokens of the timeline


def main() -> int:
    """Run the whole comparison, or, inside a host, one node of it."""
    arguments = parse_arguments()
    if arguments.node is not None:
        return run_node(arguments)
    settings = {"DBO_MICRO_BATCHES": str(arguments.micro_batches)}
    return run_on_hosts(Path(__file__), arguments.rate, arguments, settings)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parallel", choices=tuple(PARALLEL), default="tensor", help="how the hosts share the model (default: tensor)"
    )
    parser.add_argument("--rate", default="200mbit", help="rate of the link, in the words of tc (default: 200mbit)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each mode, interleaved (default: 5)")
    parser.add_argument(
        "--prefills",
        nargs="+",
        default=["1x1900", "4x500"],
        metavar="NxTOKENS",
        help="workloads: prompts x tokens, with data-expert on either host (default: 1x1900 4x500)",
    )
    parser.add_argument("--micro-batches", type=int, default=2, help="parts of a split step (default: 2)")
    add_host_arguments(parser)
    return parser.parse_args()


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the model, and the arguments of a node of `run_on_hosts`."""
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: 4)")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    add_node_arguments(parser)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments with which `run_nodes` runs a program on either host."""
    parser.add_argument("--node", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    parser.add_argument("--interfaces", nargs=2, help=argparse.SUPPRESS)


def run_on_hosts(program: Path, rate: str | None, arguments: argparse.Namespace, settings: dict[str, str]) -> int:
    """Make hosts and a model, and run *program* with its own arguments on either host; return how the first ends."""
    signal.signal(signal.SIGTERM, leave)
    try:
        with tempfile.TemporaryDirectory() as directory, TwoHosts(rate) as hosts:
            from random_deepseek import make_checkpoint

            model = make_checkpoint(Path(directory), arguments.hidden, arguments.layers)
            return run_nodes(program, hosts, model, settings)
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def leave(*_: Any) -> NoReturn:
    """End as a failure would, so that nodes and hosts are removed, and let no second signal disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def run_nodes(program: Path, hosts: tuple[Host, Host], model: Path, settings: dict[str, str]) -> int:
    """Start the second node, run the first, and end the second whatever happens."""
    first, second = hosts
    cores = sorted(os.sched_getaffinity(0))
    this = [sys.executable, str(program.resolve()), *sys.argv[1:], "--model", str(model)]
    this += ["--master", f"{first.address}:29500"]  # nothing else listens on a host that was just made
    this += ["--interfaces", *(f"{host.namespace}:{host.interface}" for host in hosts)]
    settings = {
        "VLLM_ASCEND_ENABLE_DBO": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the node: prompts that come together are one step
        **settings,
    }
    nodes = (
        Program(host.command(*this, "--node", str(number)), {**host.environment(core), **settings})
        for number, (host, core) in enumerate(((first, cores[0]), (second, cores[-1])))
    )
    with start_together(*nodes) as (leader, follower):
        ended = wait_for_first(leader, follower)
        if ended is None:
            print("error: the second host's node has ended; its own message is above.", file=sys.stderr)
        return 1 if ended is None else ended


def run_node(arguments: argparse.Namespace) -> int:
    """Be a node that drives an engine, or follow; the first prints."""
    options = join_tensor_parallel(arguments) if arguments.parallel == "tensor" else join_data_parallel(arguments)
    from vllm import LLM

    from dbo_runtime.config import read_environment

    leads = arguments.node == 0
    llm = LLM(arguments.model, disable_log_stats=True, use_tqdm_on_load=False, **options)
    let_workers_go_first()
    table, same = compare_modes(llm, arguments.prefills, arguments.repeat, format_ranks=leads)
    steps = gather(llm, llm.collective_rpc("dbo_statistics"))
    timeline = draw_timeline(llm, *DRAWN[arguments.parallel])
    if leads:
        parallel = PARALLEL[arguments.parallel].format(dispatch=read_environment(os.environ).dispatch)
        model = f"hidden {arguments.hidden}, {arguments.layers} layers, fp32"
        print(f"\nlink {arguments.rate}, {parallel} over two hosts, {model}")
        print(f"{arguments.micro_batches} micro-batches; medians of {arguments.repeat} interleaved runs")
        print(f"\n{table}\n\nsteps of each rank:", *steps)
        print(f"\n{timeline}")
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # an engine that meets the end of the interpreter prints a page about it
    return 1 if leads and not same else 0


if __name__ == "__main__":
    sys.exit(main())
