"""Count which serve commands of vllm-ascend's tutorials would be split, by what `dbo doctor -- vllm serve ...` asks.

    make count-recipes
    make count-recipes ASCEND=0.23.0.post1

asks vLLM and vllm-ascend for their configuration of each command that prefills on more than one rank, over the stand-in
for CANN. It writes the counts to docs/ascend.md, a line a command to docs/recipes.md, and the tests behind each to
docs/recipes-evidence.md. Nothing is served.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dbo_runtime.lab.doctor.probe import find_facts
from dbo_runtime.lab.doctor.probe_process import run_probe
from dbo_runtime.lab.doctor.serve_command import list_overlaps
from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.standin.cann import cann
from tests.standin.cann.build import build
from tests.support.ascend.engines import ENVIRONMENT
from tests.support.ascend.proofs import FIRST_STEPS, list_proofs
from tests.support.ascend.recipes import Recipe, make_command, read_recipes
from tests.support.page import ROOT, make_table, tell_section

RELEASE = find_release() or LATEST_ASCEND
NOT_DEFAULT = ("DBO_MODE", "DBO_SPLIT", "DBO_CHECK")  # in the environment of other tests
VARIABLES = {
    **{name: value for name, value in ENVIRONMENT.items() if name not in NOT_DEFAULT},
    "NPU_STANDIN_DEVICES": "16",  # of a host
}
IMPORTED = ("torch_npu", "vllm.engine.arg_utils", "vllm.entrypoints.cli.serve", "vllm.transformers_utils.configs")
NO_ADAPTER = "no adapter is registered"
NOT_ACCEPTED = "vLLM does not accept it over the stand-in"
NOTHING_TO_HIDE = "no communication to hide"
WOULD_BE_SPLIT = "nothing: would be split"
AT_ONCE = 2  # processes
COMMAND = "make count-recipes" if RELEASE == LATEST_ASCEND else f"make count-recipes ASCEND={RELEASE}"
DOCS = ROOT / "docs"


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
    def verdict(self) -> str:
        """How its steps would be split, or why not."""
        if self.reasons:
            return f"unsplit: {'; '.join(map(_shorten, self.reasons))}"
        split = "split into nano-batches" if self.in_nano_batches else "split"
        return f"{split}, first steps compared: {'; '.join(self.compared)}" if self.compared else split


def ask(recipe: Recipe) -> Answer:
    """Return why a command would not be split, in the words of the doctor, or of vLLM if it does not accept it."""
    return _ask(recipe, _probe_in_new_process)


def ask_all(recipes: Iterable[Recipe]) -> Iterator[Answer]:
    """Return the same of each command, in order, far sooner: processes are forked from this one, which imports once.

    This process must not have loaded vLLM's plugins: what they do may depend on the variables of a command.
    """
    os.environ.update(make_environment())  # vLLM starts processes that look at models' classes
    cann.load()
    for name in IMPORTED:
        import_module(name)
    with get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:
        yield from pool.imap(_ask_in_fork, recipes, chunksize=1)


def _ask_in_fork(recipe: Recipe) -> Answer:
    return _ask(recipe, _probe_here)


def _ask(recipe: Recipe, probe: Callable[[Sequence[str], Mapping[str, str]], Mapping[str, Any]]) -> Answer:
    if recipe.config is None:
        return Answer(recipe, (NO_ADAPTER,))
    with TemporaryDirectory() as folder:
        facts = probe(*make_command(recipe, Path(folder), RELEASE))
    if "error" in facts:
        return Answer(recipe, (f"{NOT_ACCEPTED} ({facts['error']})",))
    if facts["unknown_arguments"]:
        return Answer(recipe, (f"{NOT_ACCEPTED} ({', '.join(name for name, _ in facts['unknown_arguments'])})",))
    overlaps = list_overlaps(facts["parallel"])
    reasons = facts["declines"] or ([] if overlaps else [NOTHING_TO_HIDE])
    if reasons:
        return Answer(recipe, tuple(reasons))
    proofs = list_proofs(recipe, facts["architecture"], facts["parallel"])  # one test may be of several things
    unproven = () if RELEASE == LATEST_ASCEND else ("all of it, with this vLLM",)
    compared, in_nano_batches = tuple(facts["compared"]) or unproven, bool(facts["no_micro_batches"])
    behind = (FIRST_STEPS,) if compared else tuple(dict.fromkeys(proofs))
    return Answer(recipe, (), tuple(overlaps), behind, compared, in_nano_batches)


def _probe_in_new_process(arguments: Sequence[str], variables: Mapping[str, str]) -> Mapping[str, Any]:
    return run_probe("serve", {**os.environ, **make_environment()}, *arguments, **variables)


def make_environment() -> dict[str, str]:
    """Return the variables with which vllm-ascend is found, over the stand-in for CANN."""
    return {**VARIABLES, "LD_LIBRARY_PATH": str(build())}


def _probe_here(arguments: Sequence[str], variables: Mapping[str, str]) -> Mapping[str, Any]:
    os.environ.update(variables)
    sys.path[:0] = variables.get("PYTHONPATH", "").split(os.pathsep)
    return find_facts("serve", *arguments)


def count(answers: Sequence[Answer]) -> list[list[object]]:
    """Return, for each reason, how many commands have it, how many of prefill nodes, and how many no other reason."""
    named = [(answer.recipe, {_shorten(reason) for reason in answer.reasons} or {WOULD_BE_SPLIT}) for answer in answers]
    of_all = Counter(reason for _, reasons in named for reason in reasons)
    of_prefill = Counter(reason for recipe, reasons in named for reason in reasons if recipe.kv_role == "kv_producer")
    alone = Counter(reason for _, reasons in named for reason in reasons if len(reasons) == 1)
    return [[reason, found, of_prefill[reason], alone[reason]] for reason, found in of_all.most_common()]


def list_commands(answers: Iterable[Answer]) -> list[list[str]]:
    """Return a row for each command: where it is, how it serves, and how it is split or why not."""
    return [[*describe(answer.recipe), answer.verdict] for answer in answers]


def list_evidence(answers: Iterable[Answer]) -> list[list[str]]:
    """Return a row for each command that would be split: where it is, what overlaps, and the tests behind that."""
    return [
        [describe(answer.recipe)[0], ", ".join(answer.overlaps), ", ".join(f"`{proof}`" for proof in answer.proofs)]
        for answer in answers
        if not answer.reasons
    ]


def describe(recipe: Recipe) -> tuple[str, str, str]:
    """Return where a command is, over how many ranks it serves, and with which weights, drafter and options."""
    sizes = {"TP": recipe.tensor_parallel, "DP": recipe.data_parallel, "PP": recipe.pipeline_parallel}
    if recipe.decode_context_parallel not in ("", "1"):
        sizes["DCP"] = recipe.decode_context_parallel
    layout = " ".join(f"{name}{size or '$'}" for name, size in sizes.items() if size != "1")
    connectors = recipe.connectors.replace(",", ", ")  # a line of a cell may end there
    kinds = (recipe.quantization and recipe.scheme, recipe.drafter, connectors, recipe.flags)
    where = f"{recipe.page.removesuffix('.md')}:{recipe.line}"
    return where, f"{layout} EP" if recipe.expert_parallel == "1" else layout, " ".join(filter(None, kinds))


def main() -> None:
    """Ask for each command, and write the pages."""
    answers = []
    for answer in ask_all(recipe for recipe in read_recipes(RELEASE) if recipe.overlaps):
        where = f"{answer.recipe.page}:{answer.recipe.line}"
        sys.stderr.write(f"{where}: {'; '.join(answer.reasons) or WOULD_BE_SPLIT}\n")
        answers.append(answer)
    table = make_table(["what prevents splitting", "commands", "of prefill nodes", "by itself"], count(answers))
    split = sum(not answer.reasons for answer in answers)
    prefill = sum(answer.recipe.kv_role == "kv_producer" for answer in answers)
    compared = sum(bool(answer.compared) for answer in answers)
    how = f"of {compared} the first steps would be compared; {prefill} of all are prefill nodes"
    lines = [f"**{split} of {len(answers)}** commands would be split; {how}.", "", *table]
    tell_section(True, f"recipes-{RELEASE}", COMMAND, lines, DOCS / "ascend.md")
    rows = make_table(["command", "ranks", "serves", "verdict"], list_commands(answers))
    tell_section(True, f"tutorials-{RELEASE}", COMMAND, rows, DOCS / "recipes.md")
    rows = make_table(["command", "what overlaps", "the tests behind it"], list_evidence(answers))
    tell_section(True, f"evidence-{RELEASE}", COMMAND, rows, DOCS / "recipes-evidence.md")


def _shorten(reason: str) -> str:
    """Return a reason without its detail."""
    return reason.partition(" (")[0] if not reason.startswith("not supported yet") else reason


if __name__ == "__main__":
    main()
