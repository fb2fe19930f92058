"""What the documents say is what the code does."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from argparse import ArgumentParser
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import dbo_runtime
from dbo_runtime import __main__ as program
from dbo_runtime import errors
from dbo_runtime.adapters.registry import GROUP
from dbo_runtime.observe.counts import HELP, PREFIX
from tests.support.public_names import ROOT, read_public_names
from tools.write_docs import (
    fill_tables,
    find_commands,
    list_documents,
    make_models_table,
    make_settings_table,
    print_command,
)

DOCUMENTS = list_documents()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_that_come_from_code_are_up_to_date(document: Path) -> None:
    text = document.read_text()
    assert fill_tables(text) == text, "run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "words"), [(page, words) for page in DOCUMENTS for words in find_commands(page.read_text())]
)
def test_what_commands_print_is_up_to_date(document: Path, words: str) -> None:
    assert find_commands(document.read_text())[words] == print_command(words), "run `make docs`"


def test_two_pages_have_what_commands_print() -> None:
    shown = {path.name: find_commands(path.read_text()) for path in DOCUMENTS}
    assert [name for name, commands in shown.items() if commands] == ["planner.md", "scale.md"]


def test_settings_are_in_a_table_that_comes_from_code() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    assert f"<!-- settings -->\n{make_settings_table()}<!-- /settings -->" in text


def test_models_are_in_a_table_that_comes_from_code() -> None:
    table = make_models_table()
    assert f"<!-- models -->\n{table}<!-- /models -->" in (ROOT / "docs" / "models.md").read_text()
    ours = {entry.name for entry in entry_points(group=GROUP) if "dbo_models" in entry.value}
    assert {line.split()[1] for line in table.splitlines()[2:]} == ours


def test_the_page_on_vision_has_every_reason_to_decline() -> None:
    page = (ROOT / "docs" / "vision.md").read_text()
    room = ROOT / "dbo_runtime" / "vllm_plugin" / "encoder"
    reasons = [reason for path in room.glob("*.py") for reason in re.findall(r'Decline\("([^"]+)"', path.read_text())]
    assert len(reasons) >= 7
    for reason in reasons:
        assert reason in page


def test_the_page_on_vllm_has_every_reason_of_steps() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    plugin = [path for path in (ROOT / "dbo_runtime" / "vllm_plugin").rglob("*.py") if path.parent.name != "encoder"]
    sources = [
        *plugin,
        *(ROOT / "dbo_runtime" / name for name in ("batch.py", "engine/runtime.py")),
        *(ROOT / "dbo_runtime" / "planner" / "online" / name for name in ("planner.py", "selection.py", "ab_trial.py")),
    ]
    reasons = {reason for path in sources for reason in re.findall(r'Decline\(\s*"([^"]+)"', path.read_text())}
    assert len(reasons) >= 25
    assert {reason for reason in reasons if reason not in page} == set()


@pytest.mark.parametrize(
    ("page", "title", "folder", "count"),
    [("vllm.md", "by the tests that prove them", "vllm_plugin", 20), ("ascend.md", "## What was run", "ascend", 7)],
)
def test_the_tests_that_prove_features_exist(page: str, title: str, folder: str, count: int) -> None:
    section = (ROOT / "docs" / page).read_text().partition(title)[2].partition("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", section))
    assert len(named) > count
    files = (ROOT / "tests" / folder).rglob("test_*.py")
    assert named <= set(re.findall(r"^def (test_\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE))


def test_every_name_of_the_public_api_is_in_its_module() -> None:
    public = read_public_names()
    assert len(public) == 7
    for module, names in public.items():
        source = ROOT.joinpath(*module.split("."))
        tree = ast.parse((source / "__init__.py" if source.is_dir() else source.with_suffix(".py")).read_text())
        assert names <= list_defined(tree), module


def test_what_modules_declare_as_public_is_on_the_page() -> None:
    public = read_public_names()
    assert set(dbo_runtime.__all__) == public["dbo_runtime"] | public["dbo_runtime.errors"]
    (declared,) = re.findall(r"__all__ = (\[.*\])", (ROOT / "dbo_runtime" / "testing.py").read_text())
    assert set(ast.literal_eval(declared)) == public["dbo_runtime.testing"]
    assert public["dbo_runtime.errors"] == {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }


def list_defined(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return names | {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_the_errors_of_devices_are_those_in_the_code() -> None:
    table = (ROOT / "docs" / "devices.md").read_text().partition("## What goes wrong")[2]
    errors = re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `")))
    code = "".join(path.read_text() for path in (ROOT / "dbo_runtime").rglob("*.py"))
    variable = re.compile(r"'\w+'| \.\.\. |, which cannot be imported \(.*")
    parts = [part.strip() for error in errors for part in variable.split(error) if part]
    assert len(errors) >= 10
    assert not [part for part in parts if part not in code]


def test_the_page_on_observing_has_every_metric() -> None:
    page = (ROOT / "docs" / "observing.md").read_text()
    table = page.partition("| metric |")[2].partition("\n\n")[0]
    named = {name.removesuffix("_total") for name in re.findall(rf"`{PREFIX}(\w+)`", table)}
    assert named == set(HELP)


def list_commands(document: Path) -> list[list[str]]:
    """Return the words after `dbo` of each call in the document's blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    call = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:dbo|python -m dbo_runtime) (\w.*)")
    found = [match[1] for block in blocks for line in block.splitlines() if (match := call.fullmatch(line.strip()))]
    return [shlex.split(words, comments=True) for words in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_blocks_are_taken_by_the_command_line(document: Path) -> None:
    for name, *words in list_commands(document):
        command = program.COMMANDS[name]
        parser = ArgumentParser(exit_on_error=False)
        import_module(command.module).add_arguments(parser)
        _, unknown = parser.parse_known_args([word for word in words if word != "..."])
        assert command.passes_on or not unknown, (name, words)


def test_the_quickstart_has_the_same_commands_in_chinese() -> None:
    english, chinese = (
        re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / name).read_text(), re.DOTALL | re.MULTILINE)
        for name in ("quickstart-ascend.md", "quickstart-ascend.zh.md")
    )
    assert len(english) == 3
    assert [re.sub(r" +#.*", "", block) for block in chinese] == [re.sub(r" +#.*", "", block) for block in english]


def test_commands_are_found_in_blocks() -> None:
    assert ["doctor", "examples/tiny-deepseek"] in list_commands(ROOT / "docs" / "settings.md")
    assert ["trace", "traces/step-000003.json", "--figure", "step.png"] in list_commands(ROOT / "docs" / "observing.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_of_make_are_in_the_makefile(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE)) <= targets


def test_the_architectures_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    code, shown = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]
    exec(compile(code, "docs/architecture.md", "exec"), {})
    assert capsys.readouterr().out == shown


FOLDERS = (".", "dbo_runtime", "dbo_runtime/vllm_plugin")  # that the page's tables leave out


def test_functions_of_the_architectures_walks_are_where_the_page_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    walks = page.partition("## One step")[2].partition("## The adapter's contract")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", walks, re.MULTILINE)
    assert len(rows) >= 15
    for name, file in rows:
        (path,) = [
            path for folder in (".", "dbo_runtime", "dbo_runtime/vllm_plugin") for path in ROOT.glob(f"{folder}/{file}")
        ]
        assert f"    def {name.rpartition('.')[2]}(" in path.read_text() or f"\ndef {name}(" in path.read_text(), name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_wheel_has_every_package() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in ROOT.glob("dbo_runtime/**/__init__.py")}
    assert set(settings["packages"]) == folders | {"dbo_models"}


MOST_COLUMNS = 7  # that a laptop shows side by side; see tests/test_site_in_browser.py


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_cut_to_what_decides(document: Path) -> None:
    heads = re.findall(r"^(\|.*)\n\|(?: *:?-+:? *\|)+$", document.read_text(), re.MULTILINE)
    columns = [[cell.strip() for cell in re.split(r"(?<!\\)\|", head)[1:-1]] for head in heads]
    wide = [cells for cells in columns if len(cells) > MOST_COLUMNS and not is_grid(cells)]
    assert wide == [], "move what does not decide into a second table"


def is_grid(cells: list[str]) -> bool:
    """Whether columns are the values of one variable: narrow, and nothing to choose from."""
    return all(re.fullmatch(r"[\d.]+", cell) for cell in cells[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_of_a_paragraph_becomes_a_heading(document: Path) -> None:
    # The site takes `#941` at the beginning of a line for a heading, repository browsers do not.
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^#+[^#\s].*", text, re.MULTILINE) == []


def test_the_readme_stays_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900
    assert max(map(len, text.splitlines())) <= 120


def test_the_readme_leads_to_every_page_that_a_user_begins_with() -> None:
    links = set(re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text()))
    pages = "troubleshooting settings models pooling hardware benchmarks first-steps write-an-adapter compared"
    assert {f"docs/{name}.md" for name in f"{pages} quickstart-ascend quickstart-cuda".split()} <= links
