"""Write the tables of the documents that come from code: `make docs`.

A document holds a table between `<!-- NAME -->` and `<!-- /NAME -->`, for each NAME in TABLES; and what a command
prints between `<!-- dbo WORDS -->` and `<!-- /dbo WORDS -->`, which takes minutes in docs/scale.md. `--check` writes
nothing and exits with 1 if a table is stale; tests/test_docs.py compares them, too.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

from dbo_runtime.__main__ import COMMANDS, SCRIPT
from dbo_runtime.__main__ import main as run_program
from dbo_runtime.adapters.registry import GROUP
from dbo_runtime.config import Setting, list_settings
from dbo_runtime.lab.doctor.remedies import REMEDIES
from dbo_runtime.vllm_plugin.api.kv_connectors import IDLE_HOOKS, WORKING_HOOKS

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Rewrite the tables, or name the documents that are stale."""
    parser = argparse.ArgumentParser(description="Write the tables of the documents that come from code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is stale")
    parser.add_argument("documents", nargs="*", type=Path, help="write only these (default: all)")
    arguments = parser.parse_args()
    is_check: bool = arguments.check
    documents = [path.resolve() for path in arguments.documents] or list_documents()
    filled = {document: fill_commands(fill_tables(document.read_text())) for document in documents}
    stale = [document for document, text in filled.items() if text != document.read_text()]
    for document in stale:
        if not is_check:
            document.write_text(filled[document])
        print(f"{document.relative_to(ROOT)}: {'stale; run `make docs`' if is_check else 'written'}")
    return 1 if is_check and stale else 0


def list_documents() -> list[Path]:
    """Return all documents of the repository."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


def fill_tables(text: str) -> str:
    """Return the text of a document with all its tables as the code has them."""
    for name, make_table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, found, rest = text.partition(begin)
        if found:
            text = head + begin + make_table() + end + rest.partition(end)[2]
    return text


def fill_commands(text: str) -> str:
    """Return the text of a document with what all its commands print now."""
    return _COMMAND.sub(lambda found: f"<!-- {found[1]} -->\n{print_command(found[1])}<!-- /{found[1]} -->", text)


def find_commands(text: str) -> dict[str, str]:
    """Return what a document says that its commands print, both as blocks, by the command."""
    return {found[1]: found[2] for found in _COMMAND.finditer(text)}


def print_command(words: str) -> str:
    """Return a command, such as `dbo plan --list`, and what it prints, as two blocks.

    Raises:
        RuntimeError: if it fails.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = run_program(shlex.split(words)[1:])
    if status:
        raise RuntimeError(f"`{words}` exits with {status}")
    return f"```\n{words}\n```\n\n```\n{printed.getvalue()}```\n"


def make_settings_table() -> str:
    """Return all settings."""
    return _make_table(Setting._fields, list_settings())


def make_models_table() -> str:
    """Return the architectures that this repository has adapters for, and how long these are."""
    heads = "architecture", "adapter in `dbo_models`", "lines", "what overlaps"
    ours = sorted((entry.name, entry.value) for entry in entry_points(group=GROUP) if "dbo_models" in entry.value)
    return _make_table(
        heads, [(name, value.removeprefix("dbo_models."), *_describe_adapter(value)) for name, value in ours]
    )


def make_connectors_table() -> str:
    """Return the KV connectors that are known."""
    idle = [(f"`{name}`", "do nothing", what) for name, what in IDLE_HOOKS.items() if name not in WORKING_HOOKS]
    working = [(f"`{name}`", "are called as unsplit", what) for name, what in WORKING_HOOKS.items()]
    return _make_table(("connector", "its layer hooks", "where KV moves, or what they do"), [*idle, *working])


def make_commands_table() -> str:
    """Return the commands of the command line."""
    rows = [(f"`{SCRIPT} {name}`", command.summary, command.needs or "") for name, command in COMMANDS.items()]
    return _make_table(("command", "what it does", "needs"), rows)


def make_remedies_table(group: str) -> str:
    """Return the reasons to decline of one group, with what they mean and what to do."""
    rows = [
        ("<br>".join(f"`{reason}`" for reason in remedy.reasons), *map(_link_pages, (remedy.meaning, remedy.action)))
        for remedy in REMEDIES[group]
    ]
    return _make_table(("reason in the log", "what it means", "what to do"), rows)


def make_versions_table() -> str:
    """Return how many tests of each suite passed on each version of vLLM, as `make test-compat` has kept it."""
    results = json.loads((ROOT / "tests" / "compat" / "results.json").read_text())
    suites = dict.fromkeys(suite for found in results.values() for suite in found["suites"])
    rows = [(suite, *(_describe_counts(found["suites"].get(suite)) for found in results.values())) for suite in suites]
    versions = (f"vLLM {vllm}, torch {found['torch']} ({found['date']})" for vllm, found in results.items())
    return _make_table(("tests of", *versions), rows)


def make_recorded_table() -> str:
    """Return what came of each architecture on the classes of each version, as `make record-adapters` has kept it."""
    results = json.loads((ROOT / "tests" / "compat" / "recorded.json").read_text())
    names = sorted({name for found in results.values() for name in found["architectures"]})
    rows = [
        (name, *(_describe_recorded(found["architectures"].get(name)) for found in results.values())) for name in names
    ]
    return _make_table(("architecture", *(f"{vllm} ({found['date']})" for vllm, found in results.items())), rows)


def _link_pages(text: str) -> str:
    """Return a text of the doctor's with links to the pages in docs/ that it names."""
    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", lambda page: f"[{page[1]}]({page[1]}{page[2] or ''})", text)


def _describe_recorded(found: Mapping[str, str] | None) -> str:
    if found is None:
        return "-"
    encoder = found.get("encoder", "")
    return f"{found['what']}; encoder {encoder.partition(':')[0]}" if encoder[:3] in ("ran", "rec") else found["what"]


def _describe_counts(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "not run"
    others = [f"{counts[outcome]} {outcome}" for outcome in ("failed", "skipped") if counts[outcome]]
    return ", ".join([f"{counts['passed']} passed", *others])


def _describe_adapter(value: str) -> tuple[str, str]:
    module = value.removeprefix("dbo_models.").partition(":")[0]
    source = (ROOT / "models" / f"{module}.py").read_text()
    has_experts = "moe" in source.lower()
    overlaps = "all-reduces; tokens on their way to experts and back" if has_experts else "all-reduces"
    return str(len(source.splitlines())), overlaps


def _make_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(heads)
    lines = [columns, *(list(row) for row in rows)]
    head, *body = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(columns), *body, ""])


_COMMAND = re.compile(r"<!-- (dbo [^>]*?) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
TABLES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "settings": make_settings_table,
        "models": make_models_table,
        "commands": make_commands_table,
        "connectors": make_connectors_table,
        "versions": make_versions_table,
        "recorded": make_recorded_table,
        **{f"remedies: {group}": partial(make_remedies_table, group) for group in REMEDIES},
    }
)


if __name__ == "__main__":
    sys.exit(main())
