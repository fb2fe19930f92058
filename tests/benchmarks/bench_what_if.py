"""What the planner predicts for set-ups that others published, compared with what they gained.

    python -m pytest tests/benchmarks/bench_what_if.py -q -s

All predictions are *modelled*, from the published cases of `python -m dbo_runtime plan --list`; docs/planner.md says
what is given in each and what is assumed. The first four rows are about one and the same run each. The others compare
a gain with the case that is nearest to it, so they tell whether predictions are in the right range, and no more.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.whatif.derived.scale_cases import derive_tables
from dbo_runtime.lab.whatif.published_cases import list_cases
from dbo_runtime.lab.whatif.whatif import WhatIf, predict_step
from tests.support.page import ROOT, Publish, find_command, make_table

HEADER = ("published", "set-up", "gain", "case", "predicted", "by published", "what differs")
ASCEND = "https://github.com/vllm-project/vllm-ascend/"


class Published(NamedTuple):
    """What somebody measured, and the case that is nearest to it.

    Attributes:
        source: who, in markdown.
        what: of the set-up.
        gains: least and most times faster with overlap; None if none was published.
        case: name of the case; None if nothing was published from which costs could be made.
        remark: what is different between the two.
    """

    source: str
    what: str
    gains: tuple[float, float] | None
    case: str | None
    remark: str


PUBLISHED = (
    Published(
        f"[vllm-ascend #941]({ASCEND}pull/941)",
        "910B, DeepSeek-R1, TP 16; 0.90 to 1.01 requests/s",
        (1.01 / 0.90,) * 2,
        "r1-tp16-941",
        "the same run; #941 cut between requests only and left dense layers unsplit",
    ),
    Published(
        f"[vllm-ascend #1589]({ASCEND}pull/1589)",
        "DP 2, TP 8, EP 16; mean time to the first token 4017 to 3017 ms",
        (4017 / 3017,) * 2,
        "r1-ep16-1589",
        "the same run; contention is fitted to #941",
    ),
    Published(
        "[vLLM #44677](https://github.com/vllm-project/vllm/pull/44677)",
        "4 H200, Qwen3-32B, TP 4; 1110 to 1047 ms",
        (1110 / 1047,) * 2,
        "qwen3-tp4-44677",
        "the same run; contention is fitted to it",
    ),
    Published(
        "[TokenWeave](https://arxiv.org/abs/2505.11329)",
        "8 H100, Llama-3.3-70B, TP 8, a prompt of 4096 tokens",
        (1.262,) * 2,
        "llama70b-tp8-11329",
        "the same run; TokenWeave also fuses the all-reduce with the normalization",
    ),
    Published(
        "[CloudMatrix-Infer](https://arxiv.org/abs/2506.12708)",
        "910C, DeepSeek-R1, prefill; from a secondary source",
        (1.23, 1.31),
        "910c-share-5591",
        "the same chip; other parallel sizes, and the case's share of communication is published as a most",
    ),
    Published(
        "[SGLang](https://lmsys.org/blog/2025-05-05-large-scale-ep/)",
        "96 H100, DeepSeek-V3, prefill, large-scale EP",
        (1.27, 1.35),
        None,
        "no durations of ops were published with it",
    ),
    Published(f"[vllm-ascend #4894]({ASCEND}pull/4894)", "A3, an example of a layer", None, "a3-layer-4894", ""),
    Published(f"[vllm-ascend #4894]({ASCEND}pull/4894)", "910B, a profile of a prefill", None, "910b-profile-4894", ""),
    Published(
        f"[vllm-ascend #5591]({ASCEND}issues/5591)", "910B, the share of communication", None, "910b-share-5591", ""
    ),
)


@pytest.fixture(scope="module")
def answers() -> dict[str, WhatIf]:
    """What the planner says of each case of prompts. docs/scale.md compares those that are derived for its page."""
    at_scale = derive_tables().keys()
    prompts = [case for case in list_cases() if case.step.prefill_tokens and case.name not in at_scale]
    return {case.name: predict_step(case.table, case.step, RuntimeConfig()) for case in prompts}


def list_speed_ups(answer: WhatIf) -> list[str]:
    """Return by how much faster the step is in each number of micro-batches, and the most that any order allows."""
    speed_ups = [answer.speed_up(split.seconds) for split in answer.splits]
    most = max(answer.speed_up(split.bound) for split in answer.splits)
    return [f"{speed_up:.3f}x" for speed_up in (*speed_ups, most)]


def describe_gains(published: Published) -> str:
    if published.gains is None:
        return "-"
    least, most = (f"{gain:.2f}" for gain in published.gains)
    return f"{least}x" if least == most else f"{least} to {most}x"


def describe_difference(published: Published, answer: WhatIf | None) -> str:
    """Return by which share the prediction for the best split is above, or below, what was published."""
    if published.gains is None or answer is None or answer.best is None:
        return "-"
    predicted = answer.speed_up(answer.best.seconds)
    most, least = (f"{predicted / gain - 1:+.0%}" for gain in published.gains)
    return least if least == most else f"{least} to {most}"


def make_row(published: Published, answer: WhatIf | None) -> list[str]:
    best = None if answer is None or answer.best is None else f"{answer.speed_up(answer.best.seconds):.3f}x"
    case = "-" if published.case is None else f"`{published.case}`"
    comparison = (describe_gains(published), case, best or "-", describe_difference(published, answer))
    return [published.source, published.what, *comparison, published.remark]


def test_predictions_compared_with_what_was_published(publish: Publish, answers: dict[str, WhatIf]) -> None:
    assert {published.case for published in PUBLISHED} - {None} == answers.keys()
    rows = [make_row(each, None if each.case is None else answers[each.case]) for each in PUBLISHED]
    note = (
        "*gain* is published; *predicted*, of the better of two and three micro-batches, is **modelled**. "
        "[The planner's page](planner.md#published-cases) has both, and the most that any order allows."
    )
    publish("what-if", find_command(__file__), [*make_table(HEADER, rows), "", note])


def test_the_planner_s_page_has_the_same_figures(answers: dict[str, WhatIf]) -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for name, answer in answers.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        *_, unsplit, in_two, in_three, most = (cell.strip() for cell in row.strip("|").split("|"))
        assert [unsplit, in_two, in_three, most] == [f"{answer.unsplit * 1e3:.2f} ms", *list_speed_ups(answer)]
