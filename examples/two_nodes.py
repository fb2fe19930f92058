"""How two nodes serve one model: vLLM's options on either of them, however the nodes were made."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

OPTIONS = {
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "dbo_runtime.vllm_plugin.extension.WorkerExtension",
    "dtype": "float32",
    "attention_backend": "CPU_MLA",  # the one for AMX, where there is AMX, takes no fp32 and caches prompts
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
}
PARALLEL = {"tensor": "TP=2", "data-expert": "DP=2 with expert parallel by {dispatch}"}


def join_tensor_parallel(arguments: argparse.Namespace, base: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    """Return the options of the first node's engine, which drives both; the second becomes a server that follows."""
    options = {**base, **share_tensors(arguments.node, arguments.master)}
    if arguments.node == 1:
        follow(arguments.model, options)
    return options


def share_tensors(node: int, master: str) -> dict[str, Any]:
    """Return what makes a node one of two that share each layer; *master* is where the first one meets the other."""
    address, port = master.split(":")
    return {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": node,
        "master_addr": address,
        "master_port": int(port),
    }


def follow(model: str, options: dict[str, Any]) -> NoReturn:
    """Become a server without a head."""
    words = find_server(model, options, "--headless")
    os.execv(words[0], words)


def let_workers_go_first() -> None:
    """Give way to the workers that have been started, from now on.

    vLLM's driver spins while it waits for them, which elsewhere it does on a core of its own.
    """
    os.nice(19)


def find_server(model: str, options: dict[str, Any], *more: str) -> list[str]:
    """Return the command line of a server with these options."""
    return [find_vllm(), "serve", model, *(_write(name, value) for name, value in options.items()), *more]


def _write(name: str, value: Any) -> str:
    """Return an option in the words of a command line."""
    words = name.replace("_", "-")
    return {True: f"--{words}", False: f"--no-{words}"}[value] if isinstance(value, bool) else f"--{words}={value}"


def find_vllm() -> str:
    """Return the `vllm` command next to the running Python."""
    return str(Path(sys.executable).with_name("vllm"))


def join_data_parallel(arguments: argparse.Namespace, base: dict[str, Any] = OPTIONS) -> dict[str, Any]:
    """Return the options of this node's engine; each drives its own, and all do the same in the same order."""
    address, port = arguments.master.split(":")
    os.environ.update(
        VLLM_DP_SIZE="2",
        VLLM_DP_RANK=str(arguments.node),
        VLLM_DP_RANK_LOCAL="0",
        VLLM_DP_MASTER_IP=address,
        VLLM_DP_MASTER_PORT=port,
    )
    return {**base, "enable_expert_parallel": True}
