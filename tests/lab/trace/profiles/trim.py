"""Make the profiles that tests read of what vLLM's profiler wrote: real ones, without what nothing reads.

Two were made on 2026-11-25 on a machine without accelerators, on two cores, from `examples/tiny-deepseek` with
vLLM 0.30.0 (CPU), torch 2.13.0 and two tensor parallel ranks over gloo:

    python -m tests.lab.trace.profiles.record split FOLDER     # VLLM_ASCEND_ENABLE_DBO=1 DBO_MODE=always
    python -m tests.lab.trace.profiles.record vllm FOLDER      # vLLM alone
    python -m tests.lab.trace.profiles.trim FOLDER/*rank-0*.gz tests/lab/trace/profiles/split.json.gz

Both answer four prompts of 60 tokens with three tokens each, between `start_profile` and `stop_profile`; the file is
that of rank 0. The third is of an H100 on 2026-11-26, from part `trace` of the GPU kit (docs/hardware.md): a prefill of
two prompts of 1,000 tokens, eight layers, with copies to the host and back for all-reduces:

    python -m tests.lab.trace.profiles.trim profile.pt.trace.json.gz tests/lab/trace/profiles/h100.json.gz

Left out are events inside other events of PyTorch's own ops (`aten::`), arguments that only number
events, and the host's name. Times are as they were recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

DROPPED_ARGUMENTS = ("Ev Idx", "Record function id", "Sequence number", "Fwd thread id", "External id")
DROPPED_FIELDS = ("host_name", "trace_id", "traceName")


def trim(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a profile without what nothing reads."""
    ends: dict[Any, float] = {}
    kept = []
    for event in sorted(profile["traceEvents"], key=lambda event: (event["ts"], -event.get("dur", 0))):
        if event.get("cat") == "cpu_op":
            end = event["ts"] + event["dur"]
            is_inner = end <= ends.get(event["tid"], 0.0)
            ends[event["tid"]] = max(end, ends.get(event["tid"], 0.0))
            if is_inner and event["name"].startswith("aten::"):
                continue
        arguments = {name: value for name, value in event.get("args", {}).items() if name not in DROPPED_ARGUMENTS}
        kept.append({**{name: value for name, value in event.items() if name != "args"}, "args": arguments})
    rest = {name: value for name, value in profile.items() if name not in DROPPED_FIELDS}
    return {**rest, "traceEvents": kept}


def main(source: str, target: str) -> None:
    """Write what is left of a profile."""
    text = json.dumps(trim(json.loads(gzip.decompress(Path(source).read_bytes()))), separators=(",", ":"))
    Path(target).write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
