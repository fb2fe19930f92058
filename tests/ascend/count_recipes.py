"""Count which serve commands of vllm-ascend's tutorials would be split, by what `dbo doctor -- vllm serve ...` asks.

    make count-recipes

asks vLLM and vllm-ascend for their configuration of each command that prefills on more than one rank, over the stand-in
for CANN, and writes the counts to docs/ascend.md. Nothing is served.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from dbo_runtime.doctor.probe_process import run_probe
from tests.ascend.conftest import ENVIRONMENT
from tests.ascend.recipes import Recipe, make_command, read_recipes
from tests.benchmarks.page import ROOT, make_table, tell_section
from tests.standin_cann import cann
from tests.standin_cann.build import build

DEVICES = "16"  # of a host
NO_ADAPTER = "no adapter is registered"
NOT_ACCEPTED = "vLLM does not accept it over the stand-in"
WOULD_BE_SPLIT = "nothing: would be split"


class Answer(NamedTuple):
    """What prevents splitting a command: nothing, if it would be split."""

    recipe: Recipe
    reasons: tuple[str, ...]


def ask(recipe: Recipe) -> Answer:
    """Return why a command would not be split, in the words of the doctor, or of vLLM if it does not accept it."""
    if recipe.config is None:
        return Answer(recipe, (NO_ADAPTER,))
    with TemporaryDirectory() as folder:
        arguments, variables = make_command(recipe, Path(folder))
        environment = {**os.environ, **ENVIRONMENT, "NPU_STANDIN_DEVICES": DEVICES, "LD_LIBRARY_PATH": str(build())}
        facts = run_probe("serve", environment, *arguments, **variables)
    if "error" in facts:
        return Answer(recipe, (f"{NOT_ACCEPTED} ({facts['error']})",))
    return Answer(recipe, tuple(facts["declines"]))


def count(answers: Sequence[Answer]) -> list[list[object]]:
    """Return, for each reason, how many commands have it, how many of prefill nodes, and how many no other reason."""
    named = [(answer.recipe, {_shorten(reason) for reason in answer.reasons} or {WOULD_BE_SPLIT}) for answer in answers]
    of_all = Counter(reason for _, reasons in named for reason in reasons)
    of_prefill = Counter(reason for recipe, reasons in named for reason in reasons if recipe.kv_role == "kv_producer")
    alone = Counter(reason for _, reasons in named for reason in reasons if len(reasons) == 1)
    return [[reason, found, of_prefill[reason], alone[reason]] for reason, found in of_all.most_common()]


def main() -> None:
    """Ask for each command, and write the page."""
    build()
    cann.load()  # for this process, where torch imports torch_npu
    answers = []
    for recipe in filter(lambda each: each.overlaps, read_recipes()):
        answers.append(ask(recipe))
        if recipe.config is not None:
            sys.stderr.write(f"{recipe.page}:{recipe.line}: {'; '.join(answers[-1].reasons) or WOULD_BE_SPLIT}\n")
    table = make_table(["what prevents splitting", "commands", "of prefill nodes", "by itself"], count(answers))
    split = sum(not answer.reasons for answer in answers)
    prefill = sum(answer.recipe.kv_role == "kv_producer" for answer in answers)
    lines = [f"**{split} of {len(answers)}** commands would be split; {prefill} are prefill nodes.", "", *table]
    tell_section(True, "recipes", "make count-recipes", lines, ROOT / "docs" / "ascend.md")


def _shorten(reason: str) -> str:
    """Return a reason without its detail."""
    return reason.partition(" (")[0] if not reason.startswith("not supported yet") else reason


if __name__ == "__main__":
    main()
