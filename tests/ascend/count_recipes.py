"""Count which serve commands of vllm-ascend's tutorials would be split, by what `dbo doctor -- vllm serve ...` asks.

    make count-recipes

asks vLLM and vllm-ascend for their configuration of each command that prefills on more than one rank, over the stand-in
for CANN. It writes the counts to docs/ascend.md and a line a command to docs/recipes.md. Nothing is served.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from dbo_runtime.lab.doctor.probe_process import run_probe
from dbo_runtime.lab.doctor.serve_command import list_overlaps
from tests.standin.cann import cann
from tests.standin.cann.build import build
from tests.support.ascend.engines import ENVIRONMENT
from tests.support.ascend.proofs import FIRST_STEPS, list_proofs
from tests.support.ascend.recipes import Recipe, make_command, read_recipes
from tests.support.page import ROOT, make_table, tell_section

DEVICES = "16"  # of a host
NO_ADAPTER = "no adapter is registered"
NOT_ACCEPTED = "vLLM does not accept it over the stand-in"
NOTHING_TO_HIDE = "no communication to hide"
WOULD_BE_SPLIT = "nothing: would be split"
AT_ONCE = 2  # processes, of which each has one core's work for half a minute
COMMAND = "make count-recipes"


class Answer(NamedTuple):
    """What vllm-ascend makes of a command.

    Attributes:
        recipe: the command.
        reasons: what prevents splitting it: nothing, if it would be split.
        overlaps: which communication overlaps with computation, if it would be split.
        proofs: the tests behind that.
        compared: unproven properties of the model, for which first steps are compared.
        in_nano_batches: whether it would have nano-batches only.
    """

    recipe: Recipe
    reasons: tuple[str, ...]
    overlaps: tuple[str, ...] = ()
    proofs: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    in_nano_batches: bool = False

    @property
    def how(self) -> str:
        """How its steps would be split."""
        if self.reasons:
            return "unsplit"
        compared = f"first steps compared: {'; '.join(self.compared)}" if self.compared else "proven"
        return f"nano-batches, {compared}" if self.in_nano_batches else compared


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
    overlaps = list_overlaps(facts["parallel"])
    reasons = facts["declines"] or ([] if overlaps else [NOTHING_TO_HIDE])
    if reasons:
        return Answer(recipe, tuple(reasons))
    proofs = list_proofs(recipe, facts["architecture"], facts["parallel"])  # one test may be of several things
    compared, in_nano_batches = tuple(facts["compared"]), bool(facts["no_micro_batches"])
    behind = (FIRST_STEPS,) if compared else tuple(dict.fromkeys(proofs))
    return Answer(recipe, (), tuple(overlaps), behind, compared, in_nano_batches)


def count(answers: Sequence[Answer]) -> list[list[object]]:
    """Return, for each reason, how many commands have it, how many of prefill nodes, and how many no other reason."""
    named = [(answer.recipe, {_shorten(reason) for reason in answer.reasons} or {WOULD_BE_SPLIT}) for answer in answers]
    of_all = Counter(reason for _, reasons in named for reason in reasons)
    of_prefill = Counter(reason for recipe, reasons in named for reason in reasons if recipe.kv_role == "kv_producer")
    alone = Counter(reason for _, reasons in named for reason in reasons if len(reasons) == 1)
    return [[reason, found, of_prefill[reason], alone[reason]] for reason, found in of_all.most_common()]


def list_commands(answers: Iterable[Answer]) -> list[list[str]]:
    """Return a row for each command: where it is, how it serves and is split, and what overlaps or prevents that."""
    return [[*describe(answer.recipe), answer.how, _describe_outcome(answer)] for answer in answers]


def describe(recipe: Recipe) -> tuple[str, str, str]:
    """Return where a command is, over how many ranks it serves, and with which weights, drafter and options."""
    sizes = {"TP": recipe.tensor_parallel, "DP": recipe.data_parallel, "PP": recipe.pipeline_parallel}
    if recipe.decode_context_parallel not in ("", "1"):
        sizes["DCP"] = recipe.decode_context_parallel
    layout = " ".join(f"{name}{size or '$'}" for name, size in sizes.items() if size != "1")
    kinds = (recipe.quantization and recipe.scheme, recipe.drafter, recipe.connectors, recipe.flags)
    where = f"{recipe.page.removesuffix('.md')}:{recipe.line}"
    return where, f"{layout} EP" if recipe.expert_parallel == "1" else layout, " ".join(filter(None, kinds))


def main() -> None:
    """Ask for each command, and write the pages."""
    build()
    cann.load()  # for this process, where torch imports torch_npu
    recipes = [recipe for recipe in read_recipes() if recipe.overlaps]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(_ask_aloud, recipes))
    table = make_table(["what prevents splitting", "commands", "of prefill nodes", "by itself"], count(answers))
    split = sum(not answer.reasons for answer in answers)
    prefill = sum(answer.recipe.kv_role == "kv_producer" for answer in answers)
    compared = sum(bool(answer.compared) for answer in answers)
    how = f"of {compared} the first steps would be compared; {prefill} of all are prefill nodes"
    lines = [f"**{split} of {len(answers)}** commands would be split; {how}.", "", *table]
    tell_section(True, "recipes", COMMAND, lines, ROOT / "docs" / "ascend.md")
    header = ["command", "ranks", "serves", "how", "what overlaps, and the tests behind it; or what prevents splitting"]
    tell_section(True, "tutorials", COMMAND, make_table(header, list_commands(answers)), ROOT / "docs" / "recipes.md")


def _ask_aloud(recipe: Recipe) -> Answer:
    answer = ask(recipe)
    sys.stderr.write(f"{recipe.page}:{recipe.line}: {'; '.join(answer.reasons) or WOULD_BE_SPLIT}\n")
    return answer


def _describe_outcome(answer: Answer) -> str:
    if answer.reasons:
        return "; ".join(map(_shorten, answer.reasons))
    return f"{', '.join(answer.overlaps)}: {', '.join(f'`{proof}`' for proof in answer.proofs)}"


def _shorten(reason: str) -> str:
    """Return a reason without its detail."""
    return reason.partition(" (")[0] if not reason.startswith("not supported yet") else reason


if __name__ == "__main__":
    main()
