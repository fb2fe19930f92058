"""Recognize kernels and host ops that communicate by their names: of NCCL, HCCL, gloo, vLLM, DeepEP and the like."""

from __future__ import annotations

import re

_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|hcom_|xccl|nvshmem|gloo:|mpi:|c10d|record_param_comms"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv"
    r"|cross_device_reduce|quick_?reduce|multimem|shm_"  # kernels of vLLM, FlashInfer and SGLang
    r"|deep_?ep|pplx|distribute_?(?:dispatch|combine)"  # kernels that send tokens to their experts and back
    r"|memcpy ptop"
)
_COPY = re.compile(r"memcpy (?:htod|dtoh)|memcpy_async")


def is_communication(name: str) -> bool:
    """Return whether a kernel or host op of this name communicates with other ranks."""
    return _COMMUNICATION.search(name.lower()) is not None


def is_host_copy(name: str) -> bool:
    """Return whether an event copies between host and device, which is neither computation nor communication."""
    return _COPY.search(name.lower()) is not None
