"""Traces that a real run has left, held against the format and against a script of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dbo_runtime.lab.trace.trace_file import read_trace
from tests.support.observe import overlap_script
from tests.support.observe.trace_format import check_format


def check_traces(folder: Path, ranks: int, steps: int | None = None) -> list[float]:
    """Return the share hidden in each step of each rank, by the script, once all is well.

    Each trace must be well formed, hold all ranks on one clock, and have `dbo trace` print what the script finds in it.
    """
    files = sorted(folder.glob("step-*.json"))
    assert files
    assert steps in (None, len(files))
    hidden: list[float] = []
    for file in files:
        check_format(json.loads(file.read_text()))
        timelines = read_trace(file)
        assert list(timelines) == [f"rank {rank}" for rank in range(ranks)]
        starts, ends = (
            [pick(getattr(span, name) for span in timeline.spans) for timeline in timelines.values()]
            for pick, name in ((min, "start"), (max, "end"))
        )
        assert max(starts) < min(ends)  # they ran together
        found = _run(overlap_script.__file__, str(file))
        hidden += [figures["hidden"] for figures in found.values()]
        printed = _run("-m", "dbo_runtime", "trace", str(file), "--json")[file.name]
        for name, figures in found.items():
            assert all(abs(printed[name][key] - figures[key]) < 1e-6 for key in ("overlap", "hidden"))
    return hidden


def _run(*words: str) -> dict[str, dict[str, float]]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found
