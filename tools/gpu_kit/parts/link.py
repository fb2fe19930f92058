"""Prefill with a link in place of a second GPU: unsplit, split without overlap, split with overlap.

Each all-reduce sends its tensor to the host's pinned memory and back, in unsplit steps as in split ones. That says what
overlap gains on this chip with a link of the measured rate that takes no multiprocessor. It is no tensor parallelism.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

import torch

from ..plugin import LINK
from ..plugin import Link as Sender
from .engine import Engine, import_example
from .findings import Findings, run_part

PREFILLS = {"cuda": ("1x8000", "4x2000", "8x1000", "1x2000"), "cpu": ("1x800", "4x200")}
REPEAT = {"cuda": 7, "cpu": 3}
TRIES = 5
UNSPLIT, SEQUENTIAL, OVERLAPPED = "unsplit", "split, no overlap", "dual-batch overlap"


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Measure one model."""
    (model,) = words
    engine = Engine(model, device)
    config = engine.llm.llm_engine.vllm_config.model_config.hf_config
    findings.note("engine", described := engine.describe())
    findings.note("model", {"layers": config.num_hidden_layers, "hidden": config.hidden_size})
    findings.attempt("link", lambda: measure_link(device, config.hidden_size))
    for prefill in PREFILLS[device]:
        findings.attempt(prefill, partial(time_prefill, engine, prefill, REPEAT[device]))
    findings.attempt("timeline", lambda: draw(engine, PREFILLS[device][0]))
    findings.note("steps", counted := engine.count())
    timed = {
        name: found for name, found in findings.found.items() if isinstance(found, dict) and "same tokens" in found
    }
    different = [name for name, found in timed.items() if not found["same tokens"]]
    # The model has vLLM's dummy weights, whose best words are nearly ties: in half precision rounding decides among
    # them, and part `equal` compares answers.
    if different and not findings.failed and described["dtype"] == "float32":
        findings.fail(f"other tokens: {', '.join(different)}")
    if not counted["split"]:
        findings.fail("no step was split")


def measure_link(device: str, hidden: int) -> dict[str, float]:
    """Return how fast a tensor as large as those of a long prefill is sent there and back, each way counted once."""
    tokens = int(PREFILLS[device][0].partition("x")[2])
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    sender = Sender(share := float(os.environ[LINK]))
    wait = getattr(torch, device).synchronize
    seconds = []
    for _ in range(TRIES + 1):
        wait()
        start = time.perf_counter()
        sender.send(x)
        wait()
        seconds.append(time.perf_counter() - start)
    sent = x.numel() * x.element_size() * share
    return {"share": share, "GB/s": float(f"{sent / min(seconds[1:]) / 1e9:.3g}"), "bytes": sent}


def time_prefill(engine: Engine, prefill: str, repeat: int) -> dict[str, Any]:
    """Time a prefill, such as `4x2000`, in each mode in turn."""
    prompts, tokens = map(int, prefill.split("x"))
    seconds, same = import_example("compare_modes").time_modes(engine.llm, prompts, tokens, repeat)
    return describe_times(seconds) | {"same tokens": same}


def describe_times(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, all times, and gains."""
    medians = {mode: statistics.median(times) for mode, times in seconds.items()}
    return {
        "ms": {mode: round(median * 1e3, 3) for mode, median in medians.items()},
        "all ms": {mode: [round(each * 1e3, 3) for each in times] for mode, times in seconds.items()},
        "gain": round(medians[UNSPLIT] / medians[OVERLAPPED], 3),
        "gain by overlap alone": round(medians[SEQUENTIAL] / medians[OVERLAPPED], 3),
    }


def draw(engine: Engine, prefill: str) -> dict[str, Any]:
    """Return the lanes of one more prefill with overlap, as a drawing and as figures."""
    from dbo_runtime.lab.trace.summary import summarize
    from dbo_runtime.observe.timeline import Timeline

    drawing = import_example("compare_modes").draw_timeline(engine.llm, *map(int, prefill.split("x")))
    timeline = Timeline.from_dict(engine.llm.collective_rpc("dbo_timeline")[0])
    return {"prefill": prefill, "drawn": drawing.splitlines(), "figures": summarize(timeline).as_dict()}


if __name__ == "__main__":
    run_part(run)
