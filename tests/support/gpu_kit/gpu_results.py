"""Results in the form that a GPU gives them, with figures that are made up."""

from __future__ import annotations

from typing import Any

CHIP = "NVIDIA H100 80GB HBM3"
NO_ERRORS = "== ERROR SUMMARY: 0 errors"
TIMES = {
    "ms": {"unsplit": 100.0, "split, no overlap": 104.0, "dual-batch overlap": 77.5},
    "gain": 1.29,
    "same tokens": True,
}


def make_engine(backend: str, runner: str = "first", is_equal: bool = True, steps: int = 37) -> dict[str, Any]:
    """Return what an engine of part `equal` reports."""
    compared = {"largest": 0.0125 if is_equal else 2.5, "others": 0, "ties": 0, "split steps": steps, "equal": is_equal}
    return {
        "engine": {"backends": [backend], "runner": runner, "graphs": "NONE", "dtype": "bfloat16"},
        "tolerance": 0.05,
        "split by settings": compared,
        "equal": is_equal,
        "split steps": steps if is_equal else 0,
        "declined": {},
    }


def make_part(results: Any, name: str = "", failed: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the entry of a part: of the job with its *name* alone, or of a job for each of its results."""
    reasons = failed or {}
    jobs = {
        job: {"seconds": 12.5, "exit": int(job in reasons), "failed": reasons.get(job)}
        for job in ([name] if name else results)
    }
    ending = {"exit": int(bool(reasons)), "failed": "; ".join(f"{job}: {reasons[job]}" for job in reasons) or None}
    return {**ending, "at": "2026-11-27T10:00:00+00:00", "source": "abc", "results": results, "jobs": jobs}


def make_results() -> dict[str, Any]:
    """Return results of all parts."""
    machine = {
        "device": "cuda",
        "chip": CHIP,
        "driver": "580.65.06",
        "python": "3.12.3",
        "torch": "2.11.0+cu130",
        "vllm": "0.30.0",
        "commit": "0123456789abcdef",
        "source": "abc",
        "date": "2026-11-27",
        "problem": None,
    }
    share = {
        "ms computing": 40.5,
        "ms communicating": 20.25,
        "ms one after the other": 60.75,
        "ms overlapped": 43.5,
        "ms predicted": 42.5,
        "gain": 1.397,
        "gain at the bound": 1.45,
        "us an instruction": 4.5,
    }
    link = {"link": {"share": 1.0, "GB/s": 26.4}, "1x8000": TIMES, "timeline": {"drawn": [" compute |0101|"]}}
    step = {
        "predicted ms": {"unsplit": 99.0, "split": 80.0},
        "measured ms": {"unsplit": 101.0, "split": 78.0},
        "auto": "split",
        "faster": "split",
        "right": True,
    }
    parts = {
        "smoke": make_part({"rates": {"FLOP/s": 6.5e14}, "rms_norm": 0.0016, "complete": True}, "smoke"),
        "core": make_part(
            {
                "measured": {
                    "equal to the loop, to the bit": {"alternate:1, nothing sent": True},
                    "us an instruction of empty ops": {"us": 3.25, "stream switches": 733},
                    "communication 0.5 of computation": share,
                    "graph": {"equal": True, "ms to issue": 0.5, "ms to replay": 0.05},
                },
                "races": {"tests": {"passed": 9, "failed": 0, "skipped": 2}},
                "graphs": {"tests": "not here: pytest is not installed"},
            }
        ),
        "equal": make_part(
            {
                "llama": make_engine("FLASH_ATTN"),
                "llama-exact": make_engine("FLASH_ATTN", steps=17),
                "llama-second": make_engine("FLASH_ATTN", "second", steps=5),
                "mla": make_engine("FLASH_ATTN_MLA", is_equal=False),
                "mla-triton": {},
            },
            failed={"mla": "by settings: differs by 2.5, 3 other tokens"},
        ),
        "frees": make_part(
            {"schedules": {"watched by": "compute-sanitizer", "report": ["== ERROR SUMMARY: 0 errors"]}}
        ),
        "trace": make_part({"said": ["rank 0: 12.00 ms | lanes"]}, "trace"),
        "link": make_part({"8 layers of 4096": link, "61 layers of 2048": {"link": "FAILED: out of memory"}}),
        "two-ranks": make_part(
            {
                "pair": {"all-reduce of 1024 KiB": {"ms": 2.5, "GB/s": 0.42}},
                "equal": make_engine("FLASH_ATTN_MLA"),
                "halves": {"times": "not here: nvidia-cuda-mps-control is not installed"},
            }
        ),
        "priority": make_part(
            {
                "a kernel concurrent with products": {
                    "priority 0": {"times as long": 8.5},
                    "priority -1": {"times as long": 1.5},
                    "ratio of both priorities": 5.67,
                },
                "a schedule": {"priority 0": {"gain": 1.1}, "priority -1": {"gain": 1.2}},
            },
            "priority",
        ),
        "auto": make_part({"61 layers of 2048": {"1x8000": step, "right choices": "1 of 1"}}),
    }
    return {"machine": machine, "parts": parts}
