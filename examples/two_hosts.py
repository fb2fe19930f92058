"""Dual-batch overlap where there is something to hide: two hosts, one slow link, tensor parallel over both.

Makes two network namespaces on this machine (as root), joins them at --rate, serves a DeepSeek-V3 with random weights
over both with an unmodified vLLM, and times prefills three ways in turn: unsplit, split without overlap, and split with
overlap. All three give the same tokens; that is checked.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from network_hosts import Host, NetworkError, TwoHosts
from process_group import end_group

WAYS = {
    "unsplit": {"DBO_MODE": "off"},
    "split, no overlap": {"DBO_MODE": "always", "DBO_POLICY": "sequential"},
    "dual-batch overlap": {"DBO_MODE": "always", "DBO_POLICY": "alternate"},
}
EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"


def main() -> int:
    """Run the whole comparison, or, inside a host, one node of it."""
    arguments = parse_arguments()
    if arguments.node is not None:
        return measure(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed then, too
    try:
        with tempfile.TemporaryDirectory() as directory, TwoHosts(arguments.rate) as hosts:
            from random_deepseek import make_checkpoint

            model = make_checkpoint(Path(directory), arguments.hidden, arguments.layers)
            return run_nodes(hosts, model, arguments)
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="rate of the link, in the words of tc (default: 200mbit)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each way, interleaved (default: 5)")
    parser.add_argument(
        "--prefills",
        nargs="+",
        default=["1x1900", "4x500"],
        metavar="NxTOKENS",
        help="workloads: prompts x tokens (default: 1x1900 4x500)",
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: 4)")
    parser.add_argument("--micro-batches", type=int, default=2, help="parts of a split step (default: 2)")
    parser.add_argument("--node", type=int, choices=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_nodes(hosts: tuple[Host, Host], model: Path, arguments: argparse.Namespace) -> int:
    """Start the second node, run the first, and end the second whatever happens."""
    first, second = hosts
    cores = sorted(os.sched_getaffinity(0))
    this = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--model", str(model)]
    this += ["--master", f"{first.address}:29500"]  # nothing else listens on a host that was just made
    settings = {
        "VLLM_ASCEND_ENABLE_DBO": "1",
        "DBO_MICRO_BATCHES": str(arguments.micro_batches),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    nodes = [
        subprocess.Popen(
            host.command(*this, "--node", str(number)),
            env={**host.environment(core), **settings},
            start_new_session=True,  # so that its engine and workers can be ended together with it
        )
        for number, (host, core) in enumerate(((first, cores[0]), (second, cores[-1])))
    ]
    try:
        while all(node.poll() is None for node in nodes):
            time.sleep(0.2)
        leader = nodes[0].poll()
        if leader is None:
            print("error: the second host's node has ended; its own message is above.", file=sys.stderr)
        return 1 if leader is None else leader
    finally:
        for node in nodes:
            end_group(node)


def measure(arguments: argparse.Namespace) -> int:
    """Be a node: the second follows, the first drives and prints."""
    address, port = arguments.master.split(":")
    options = {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": arguments.node,
        "master_addr": address,
        "master_port": int(port),
        "distributed_executor_backend": "mp",
        "worker_extension_cls": EXTENSION,
        "dtype": "float32",
        "attention_backend": "CPU_MLA",  # the one for AMX, where there is AMX, takes no fp32 and caches prompts
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
    }
    if arguments.node == 1:
        words = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in options.items()
        ]
        vllm = str(Path(sys.executable).with_name("vllm"))
        os.execv(vllm, [vllm, "serve", arguments.model, "--headless", *words])
    from vllm import LLM

    llm = LLM(arguments.model, disable_log_stats=True, use_tqdm_on_load=False, **options)
    rows = []
    different = False
    for prefill in arguments.prefills:
        print(f"timing {prefill} ...", file=sys.stderr, flush=True)
        prompts, tokens = map(int, prefill.split("x"))
        times, same = time_ways(llm, prompts, tokens, arguments.repeat)
        medians = {way: statistics.median(seconds) for way, seconds in times.items()}
        gain, overlap = (medians[way] / medians["dual-batch overlap"] for way in ("unsplit", "split, no overlap"))
        cells = "".join(f"{f'{medians[way]:.3f} s':>22}" for way in WAYS)
        rows.append(f"{prefill:<10}{cells}{gain:>7.2f}x{overlap:>11.2f}x{'yes' if same else 'NO':>14}")
        different |= not same
    print(f"\nlink {arguments.rate}, TP=2 over two hosts, hidden {arguments.hidden}, {arguments.layers} layers, fp32")
    print(f"{arguments.micro_batches} micro-batches; medians of {arguments.repeat} interleaved runs\n")
    print(
        f"{'prefill':<10}" + "".join(f"{way:>22}" for way in WAYS) + f"{'gain':>8}{'by overlap':>12}{'same tokens':>14}"
    )
    print("\n".join(rows))
    print("\nsteps of each rank:", *llm.collective_rpc("dbo_statistics"))
    draw_timeline(llm)
    return 1 if different else 0


def time_ways(llm: Any, prompts: int, tokens: int, repeat: int) -> tuple[dict[str, list[float]], bool]:
    """Time each way *repeat* times in turn after a round to warm up; return seconds, and whether tokens agree."""
    from vllm import SamplingParams

    given = make_prompts(prompts, tokens)
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    answers = set()
    for turn in range(repeat + 1):
        for way, settings in WAYS.items():
            llm.collective_rpc("dbo_configure", args=(settings,))
            start = time.perf_counter()
            outputs = llm.generate(given, sampling, use_tqdm=False)
            if turn:
                times[way].append(time.perf_counter() - start)
            answers.add(tuple(tuple(output.outputs[0].token_ids) for output in outputs))
    return times, len(answers) == 1


def draw_timeline(llm: Any, tokens: int = 1900) -> None:
    """Print the lanes of one more prefill with overlap."""
    from vllm import SamplingParams

    from dbo_runtime.observe.timeline import Span, Timeline

    llm.collective_rpc("dbo_configure", args=(WAYS["dual-batch overlap"],))
    llm.collective_rpc("dbo_request_timeline")
    llm.generate(make_prompts(1, tokens), SamplingParams(max_tokens=1), use_tqdm=False)
    spans = llm.collective_rpc("dbo_timeline")[0]
    if spans is None:
        print("\nno step was split, so there is no timeline; the reason is in the log above")
        return
    timeline = Timeline(tuple(Span(*span) for span in spans))
    hidden = timeline.overlap("compute", "comm") / timeline.busy("comm")
    print(f"\none prefill of {tokens} tokens, {timeline.duration:.2f} s; digits are micro-batches, dots idle")
    print(timeline.draw())
    print(f"{hidden:.0%} of the communication ran beside computation")


def make_prompts(prompts: int, tokens: int) -> list[dict[str, list[int]]]:
    """Return prompts of some length that say nothing."""
    return [
        {"prompt_token_ids": [(i * 7 + j * (1 + i) + j * j) % 250 + 3 for j in range(tokens)]} for i in range(prompts)
    ]


if __name__ == "__main__":
    sys.exit(main())
