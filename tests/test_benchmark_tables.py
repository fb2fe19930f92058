"""The page of benchmarks: a section is replaced as a whole, or the page stays as it was."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.page import (
    PAGE,
    ROOT,
    PageError,
    describe_machine,
    describe_versions,
    find_command,
    make_table,
    tell_section,
    write_section,
)

TEXT = "# Page\n\n<!-- one -->\nold\n<!-- /one -->\n\nprose\n\n<!-- two -->\n<!-- /two -->\n\nend\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    return path


def test_only_what_is_between_the_markers_is_replaced(page: Path) -> None:
    write_section("one", "make it", make_table(["mode", "s"], [["unsplit", 2]]), page)
    text = page.read_text()
    section = text.partition("<!-- one -->\n")[2].partition("<!-- /one -->")[0]
    assert text.replace(section, "old\n") == TEXT
    assert section.splitlines()[2:] == ["`make it`", "", "| mode | s |", "| --- | --- |", "| unsplit | 2 |"]
    assert describe_machine() in section
    assert describe_versions() in section


def test_a_section_is_filled_again_and_again(page: Path) -> None:
    for lines in (["first"], ["second"], ["second"]):
        write_section("two", "make it", lines, page)
    assert "first" not in page.read_text()
    assert page.read_text().count("second") == 1
    assert page.read_text().count("<!-- two -->") == 1


@pytest.mark.parametrize(
    "text",
    ["", "<!-- one -->\n", "<!-- /one -->\n<!-- one -->\n", "<!-- one -->\n<!-- one -->\n<!-- /one -->\n"],
    ids=["neither", "no end", "end before start", "two starts"],
)
def test_a_page_without_the_section_is_left_as_it_was(page: Path, text: str) -> None:
    page.write_text(text)
    with pytest.raises(PageError, match="<!-- one -->"):
        write_section("one", "make it", ["new"], page)
    assert page.read_text() == text


def test_a_write_that_fails_leaves_the_page_and_nothing_beside_it(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_section("one", "make it", ["new"], page)
    assert page.read_text() == TEXT
    assert list(page.parent.iterdir()) == [page]


def test_the_page_keeps_its_permissions(page: Path) -> None:
    page.chmod(0o644)
    write_section("one", "make it", ["new"], page)
    assert page.stat().st_mode & 0o777 == 0o644


def test_figures_are_printed_and_written_only_if_asked(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell_section(False, "one", "make it", ["new"], page)
    assert "new" in capsys.readouterr().out
    assert page.read_text() == TEXT
    tell_section(True, "one", "make it", ["new"], page)
    assert "new" in capsys.readouterr().out
    assert "new" in page.read_text()


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert make_table(["a"], [["b | c"]])[-1] == r"| b \| c |"


def test_the_command_names_the_benchmark_from_the_root() -> None:
    file = ROOT / "tests" / "benchmarks" / "bench_scale.py"
    assert find_command(str(file)) == "python -m pytest tests/benchmarks/bench_scale.py -q -s --write-page"


def test_the_page_has_a_section_for_each_that_a_benchmark_publishes() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in PAGE.parents[1].glob("tests/benchmarks/bench_*.py"))
    names = set(re.findall(r'publish\(\s*"([\w-]+)"', sources))
    text = PAGE.read_text(encoding="utf-8")
    assert {"host-cost", "scale", "what-if"} <= names
    assert names <= set(re.findall(r"^<!-- ([\w-]+) -->\n(?:.*\n)*?<!-- /\1 -->$", text, re.MULTILINE))
