"""vLLM with two tensor parallel ranks on one GPU, as two nodes of one rank each: real collectives of NCCL.

`equal` compares answers. `halves` measures, each rank with half of the multiprocessors by MPS: without it the ranks'
kernels take turns, and no time there says anything about two GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from .engine import Engine, make_options
from .equal import compare_engine
from .findings import Findings, run_part, say_absent
from .link import time_prefill
from .nodes import find_port, make_variables, wait_for
from .smoke import find_program

MODELS = {"equal": "deepseek", "halves": "wide"}
PREFILLS = {"cuda": ("4x1000", "1x4000"), "cpu": ("2x200",)}
REPEAT = {"cuda": 5, "cpu": 2}
SECONDS = 130.0  # for both ranks
MPS = "nvidia-cuda-mps-control"
HALF = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Start both ranks, or be one of them."""
    what, *more = words
    if more:
        {"lead": lead, "follow": follow}[more[0]](findings, device, what, more[1])
        return
    if what == "halves" and device == "cuda" and find_program(MPS) is None:
        findings.note("times", say_absent(f"{MPS} is not installed, and without it ranks take turns on the GPU"))
        return
    with divide(device) if what == "halves" else undivided() as variables:
        port = str(find_port())
        own = [sys.executable, "-m", "tools.gpu_kit.parts.two_ranks"]
        ranks = []
        for rank, role in enumerate(("lead", "follow")):
            path = findings.path if role == "lead" else Path(tempfile.gettempdir()) / f"follow-{os.getpid()}.json"
            call = [*own, str(path), device, what, role, port]
            ranks.append(subprocess.Popen(call, env={**os.environ, **make_variables(rank), **variables}))
        findings.take_over(wait_for(ranks, SECONDS))


@contextmanager
def undivided() -> Iterator[dict[str, str]]:
    """Yield variables of ranks that share the device as it is."""
    yield CPU


@contextmanager
def divide(device: str) -> Iterator[dict[str, str]]:
    """Yield the variables of ranks that have half of the multiprocessors each, while MPS runs."""
    if device != "cuda":
        yield CPU
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        program, environment = str(find_program(MPS)), {**os.environ, **places}
        control = subprocess.Popen([program, "-f"], env=environment)  # in the foreground: it ends with this part
        try:
            time.sleep(2)
            yield {**places, **HALF}
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([program], input="quit -t 3\n", text=True, env=environment, timeout=20, check=False)
            control.kill()
            control.wait()


def lead(findings: Findings, device: str, what: str, port: str) -> None:
    """Be the node with the engine: compare or measure."""
    engine = Engine(MODELS[what], device, **share(port, 0))
    if what == "equal":
        compare_engine(findings, engine, device, ("--check",))
        return
    divided = tell_division(*ask_division()) if device == "cuda" else say_absent("MPS is of GPUs")
    findings.note("engine", engine.describe())
    findings.note("divided by", divided)
    for prefill in PREFILLS[device]:
        findings.attempt(prefill, partial(time_prefill, engine, prefill, REPEAT[device]))
    findings.note("steps", engine.count())


def ask_division() -> tuple[int, int]:
    """Return how many multiprocessors this rank has, and how many servers of MPS serve ranks."""
    import torch

    program = str(find_program(MPS))
    done = subprocess.run([program], input="get_server_list\n", text=True, capture_output=True, timeout=20, check=False)
    servers = sum(line.strip().isdecimal() for line in done.stdout.splitlines())
    return torch.cuda.get_device_properties(0).multi_processor_count, servers


def tell_division(multiprocessors: int, servers: int) -> str:
    """Return what divides the GPU.

    Raises:
        RuntimeError: if no server of MPS runs: a program that finds none uses the GPU as if there was no MPS, in turn
            with others, and no time there may be told.
    """
    if not servers:
        raise RuntimeError(f"{MPS} runs no server: the ranks take turns on the GPU, and their times say nothing")
    return f"MPS, half of the multiprocessors for each rank, which sees {multiprocessors}"


def follow(_: Findings, device: str, what: str, port: str) -> None:
    """Be the node without an engine, as `vllm serve --headless` is, which needs the packages of a server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from .checkpoints import get_checkpoint

    load_general_plugins()
    model = MODELS[what]
    options = {**make_options(model, device), **share(port, 1)}
    config = EngineArgs(model=str(get_checkpoint(model, device)), **options).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def share(port: str, node: int) -> dict[str, Any]:
    """Return the options of one of two nodes that share each layer."""
    return {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": node,
        "master_addr": "127.0.0.1",
        "master_port": int(port),
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
    }


if __name__ == "__main__":
    run_part(run)
