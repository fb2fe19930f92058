"""What the documents say is what the code does."""

from __future__ import annotations

import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dbo_runtime import __main__ as program
from dbo_runtime.adapter import GROUP
from tools.write_docs import fill_tables, list_documents, make_models_table, make_settings_table

ROOT = Path(__file__).parents[1]
DOCUMENTS = list_documents()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_that_come_from_code_are_up_to_date(document: Path) -> None:
    text = document.read_text()
    assert fill_tables(text) == text, "run `make docs`"


@pytest.mark.parametrize("document", ["README.md", "docs/settings.md"])
def test_settings_are_in_a_table_that_comes_from_code(document: str) -> None:
    text = (ROOT / document).read_text()
    assert f"<!-- settings -->\n{make_settings_table()}<!-- /settings -->" in text


def test_models_are_in_a_table_that_comes_from_code() -> None:
    table = make_models_table()
    assert f"<!-- models -->\n{table}<!-- /models -->" in (ROOT / "README.md").read_text()
    ours = {entry.name for entry in entry_points(group=GROUP) if "dbo_models" in entry.value}
    assert {line.split()[1] for line in table.splitlines()[2:]} == ours


def test_the_page_on_vision_has_every_reason_to_decline() -> None:
    page = (ROOT / "docs" / "vision.md").read_text()
    code = (ROOT / "dbo_runtime" / "vllm_plugin" / "encoder" / "forward.py").read_text()
    reasons = re.findall(r'Decline\("([^"]+)"', code) + re.findall(r'return "([^"]+)"', code)
    assert len(reasons) >= 6
    for reason in reasons:
        assert reason in page


def test_the_page_on_vllm_has_every_reason_of_steps() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    plugin = [path for path in (ROOT / "dbo_runtime" / "vllm_plugin").rglob("*.py") if path.parent.name != "encoder"]
    sources = [
        *plugin,
        *(ROOT / "dbo_runtime" / name for name in ("batch.py", "runtime.py", "planner/online/planner.py")),
    ]
    reasons = {reason for path in sources for reason in re.findall(r'Decline\(\s*"([^"]+)"', path.read_text())}
    assert len(reasons) >= 25
    assert {reason for reason in reasons if reason not in page} == set()


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


SWEEPS = [
    f"--costs r1-decode-{chip} --sweep tokens --side {side}" for chip in ("910c", "910b") for side in ("off", "auto")
]
PRINTED = [
    "--costs a3-layer-4894",
    "--costs r1-tp16-941 --sweep tokens,tp",
    *(pytest.param(words, marks=pytest.mark.slow) for words in SWEEPS),
]


@pytest.mark.parametrize("words", PRINTED)
def test_what_the_planner_is_said_to_print_it_prints(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/planner.md").read_text()
    quoted = re.search(
        rf"dbo_runtime plan {words}\b.*?^```\n((?:costs|speed-up|decodes).*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    assert quoted is not None
    assert program.main(["plan", *words.split()]) == 0
    assert capsys.readouterr().out.rstrip() == quoted[1].rstrip()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_wheel_has_every_package() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in ROOT.glob("dbo_runtime/**/__init__.py")}
    assert set(settings["packages"]) == folders | {"dbo_models"}
