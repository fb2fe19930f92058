"""The ways to overlap, by all published costs: micro-batches, nano-batches, both together, and the order alone.

    python -m pytest tests/benchmarks/bench_ways.py -q -s

All figures are *modelled*, from the published cases of `python -m dbo_runtime plan --list`; each row is what
`dbo plan --costs CASE --ways` prints for four prompts of 4096 tokens, or for 128 decodes after 4096 tokens.
"""

from __future__ import annotations

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.whatif.published_cases import list_cases
from dbo_runtime.lab.whatif.ways import Way, compare_ways
from tests.support.page import Publish, find_command, make_table

BATCHES = {
    "prefill": Batch((4096,) * 4, 4 * 4096),
    "decode": Batch((1,) * 128, 0, context_lens=(4096,) * 128),
}
OTHERS = ("micro-batches", "nano-batches", "order alone")
HEADER = ("case", "step", *OTHERS, "both", "chosen")
# As long as both gain no more than this over the best other way, the planner need not choose them.
HARDLY = 1.003


def test_both_together_gain_hardly_more_than_the_best_other_way(publish: Publish) -> None:
    rows, most = [], 0.0
    for case in list_cases():
        for step, batch in BATCHES.items():
            speeds = compute_speeds(compare_ways(case.table, batch, RuntimeConfig()))
            best = max(OTHERS, key=lambda name: speeds.get(name, 0.0))
            most = max(most, speeds.get("both", 0.0) / max(speeds[best], 1.0))
            chosen = best if speeds[best] > 1.0 + RuntimeConfig().margin else "unsplit"
            figures = [f"{speeds[name]:.3f}x" if name in speeds else "-" for name in (*OTHERS, "both")]
            rows.append([f"`{case.name}`", step, *figures, chosen])
    remark = f"*Both* gain at most {most - 1:.1%} more than the best other way, so the planner does not choose them."
    publish("ways", find_command(__file__), [*make_table(HEADER, rows), "", remark])
    assert most < HARDLY


def compute_speeds(ways: list[Way]) -> dict[str, float]:
    """Return how many times as fast as the unsplit step each way is."""
    return {way.name: ways[0].seconds / way.seconds for way in ways}
