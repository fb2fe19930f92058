"""The demo on a CPU: one model over two ranks with a slow link between them, unsplit, split, and split with overlap.

The ranks are on two hosts made of network namespaces, which need root or a kernel that lets users make namespaces.
Where neither is given, the ranks stay on this host, and each reduce waits for as long as the link would take.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from compare_modes import MODES, draw_timeline, time_modes
from cores import share_cores
from network_hosts import NetworkError, TwoHosts, become_root_of_namespaces, read_rate
from two_hosts import leave, run_nodes
from two_nodes import OPTIONS, join_tensor_parallel, let_workers_go_first

from dbo_runtime.vllm_plugin.extension import WorkerExtension

PREFILL = (4, 500)  # prompts, and tokens of each
REPEATS = 5
SHOWN = 12
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}  # of torch, about what vLLM calls


class EmulatedLink(WorkerExtension):
    """Workers whose all-reduces take as long as over a link, split steps or not."""

    def emulate_link(self, bits_per_second: float) -> None:
        """Let each all-reduce of tensor parallel ranks, on whichever lane it runs, wait for its bytes."""
        import torch.distributed as dist
        from vllm.distributed.parallel_state import get_tp_group

        communicator = get_tp_group().device_communicator
        communicator.all_reduce = _delay(communicator.all_reduce, bits_per_second)  # of unsplit steps
        dist.all_reduce = _delay(dist.all_reduce, bits_per_second)  # of micro-batches


def _delay(all_reduce: Any, bits_per_second: float) -> Any:
    """Return *all_reduce* with the time in which two ranks send each other the tensor over a link."""

    def wait_and_reduce(tensor: Any, *arguments: Any, **options: Any) -> Any:
        until = time.perf_counter() + tensor.numel() * tensor.element_size() * 8 / bits_per_second
        result = all_reduce(tensor, *arguments, **options)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return result

    return wait_and_reduce


def demonstrate(program: Path, arguments: argparse.Namespace, prompts: list[str]) -> int:
    """Compare the modes over a link of `arguments.rate`; return 1 if any answer differs.

    On two hosts, either of them runs *program* again as a node.
    """
    if arguments.node is not None:
        return show(arguments, prompts, join_tensor_parallel(arguments, _limit(arguments)))
    if arguments.link == "emulated":
        return emulate(arguments, prompts)
    become_root_of_namespaces()
    signal.signal(signal.SIGTERM, leave)
    try:
        with TwoHosts(arguments.rate) as hosts:
            return run_nodes(program, hosts, Path(arguments.model), QUIET)
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
    if arguments.link == "namespaces":
        return 1
    print("The link is emulated instead.", file=sys.stderr)
    return emulate(arguments, prompts)


def emulate(arguments: argparse.Namespace, prompts: list[str]) -> int:
    """Compare the modes on one host whose reduces wait."""
    variables = {
        **QUIET,
        "VLLM_ASCEND_ENABLE_DBO": "1",
        "DBO_MODE": "always",  # `auto` would find all ranks on one host
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": share_cores(2),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    os.environ.update(variables)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    options = {**_limit(arguments), "tensor_parallel_size": 2, "worker_extension_cls": "slow_link.EmulatedLink"}
    return show(arguments, prompts, options)


def _limit(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**OPTIONS, "max_model_len": arguments.max_model_len}


def show(arguments: argparse.Namespace, prompts: list[str], options: dict[str, Any]) -> int:
    """Start an engine, and print answers, times and the lanes of a step; return 1 if any answer differs.

    Of two hosts, the first comes here; the second has become a server that follows.
    """
    from vllm import LLM

    is_emulated = arguments.node is None  # there are no hosts
    print("starting vLLM on both ranks ...", file=sys.stderr, flush=True)
    llm = LLM(arguments.model, disable_log_stats=True, use_tqdm_on_load=False, **options)
    if is_emulated:
        llm.collective_rpc("emulate_link", args=(read_rate(arguments.rate),))
    let_workers_go_first()
    different = compare_answers(llm, prompts, arguments.max_tokens)
    same = compare_times(llm, arguments.rate, is_emulated)
    print(f"\n{draw_timeline(llm, *PREFILL)}")
    llm.llm_engine.engine_core.shutdown()
    return 1 if different or not same else 0


def compare_answers(llm: Any, prompts: list[str], max_tokens: int) -> int:
    """Answer unsplit and with overlap, and print the answers; return how many differ."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    answers: dict[str, list[Any]] = {}
    for mode in ("unsplit", "dual-batch overlap"):
        print(f"answering, {mode} ...", file=sys.stderr, flush=True)
        llm.collective_rpc("dbo_configure", args=(MODES[mode],))
        answers[mode] = [found.outputs[0] for found in llm.generate(prompts, sampling, use_tqdm=False)]
    counts = llm.collective_rpc("dbo_statistics")[0]
    split = counts["split"] + counts["nano"]
    pairs = list(zip(prompts, answers["unsplit"], answers["dual-batch overlap"], strict=True))
    print(f"\n{'prompt':<28}answer")
    for prompt, _, answer in pairs[:: -(-len(pairs) // SHOWN)]:
        print(f"{textwrap.shorten(prompt, 26):<28}{textwrap.shorten(answer.text, 60)}")
    different = [each for each in pairs if each[1].token_ids != each[2].token_ids]
    print(
        f"\nidentical token by token: {len(pairs) - len(different)} of {len(pairs)} answers, with {split} split steps"
    )
    for prompt, without, overlapped in different[:SHOWN]:
        print(f"  differs: {prompt!r}: {without.text!r} -> {overlapped.text!r}")
    return len(different)


def compare_times(llm: Any, rate: str, is_emulated: bool) -> bool:
    """Time prefills in each mode, and print the gain; return whether all modes gave the same tokens."""
    count, tokens = PREFILL
    print("timing prefills ...", file=sys.stderr, flush=True)
    times, same = time_modes(llm, count, tokens, REPEATS)
    where = (
        "emulated: ranks of one host wait in each reduce" if is_emulated else "between two hosts, network namespaces"
    )
    print(f"\nprefill of {count} prompts of {tokens} tokens, link of {rate} ({where}); medians of {REPEATS} runs")
    medians = {mode: statistics.median(seconds) for mode, seconds in times.items()}
    for mode, seconds in medians.items():
        print(f"  {mode:<24}{seconds:>7.3f} s{medians['unsplit'] / seconds:>8.2f}x")
    if not same:
        print("  error: the modes gave different tokens")
    return same
