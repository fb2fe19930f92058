"""Computes from a trace file alone, sharing no code with the package, what `python -m dbo_runtime trace` prints.

    python tests/support/observe/overlap_script.py FILE

prints a JSON object: for each process E_overlap, and the share of other lanes' time in which compute ran, too.
"""

import json
import sys
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ops = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = round(Fraction(e["ts"]) * 1000)  # whole nanoseconds: no rounding from here on
            ops[e["pid"]].append((lanes[e["pid"], e["tid"]], start, start + round(Fraction(e["dur"]) * 1000)))
    json.dump({names[process]: measure(found) for process, found in ops.items()}, sys.stdout)


def measure(ops):
    """Walk through all moments at which something starts or ends, and count what runs in between."""
    moments = sorted({time for _, start, end in ops for time in (start, end)})
    computing = hidden = concurrent = 0
    for left, right in pairwise(moments):
        running = [lane for lane, start, end in ops if start <= left and right <= end]
        others = {lane for lane in running if lane != "compute"}
        computing += (right - left) * ("compute" in running)
        concurrent += (right - left) * len(others)
        hidden += (right - left) * len(others) * ("compute" in running)
    total = moments[-1] - moments[0]
    serial = sum(end - start for lane, start, end in ops if lane != "compute")
    return {"overlap": float(1 - Fraction(total - computing, serial)), "hidden": float(Fraction(hidden, concurrent))}


if __name__ == "__main__":
    main()
