"""Plots of the page of benchmarks show its tables, and are readable on light pages and on dark ones."""

from __future__ import annotations

import math
import re
from pathlib import Path

import matplotlib
import pytest

from tests.benchmarks.plots import COLOURS, GREY, IMAGES, PLOTS, draw_section, find_section, read_number, read_tables
from tests.support.page import PAGE

LIGHT, DARK = "#ffffff", "#1e2129"  # the grounds of the site's two schemes


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("section", PLOTS)
def test_a_plot_is_what_its_tables_say(section: str, tmp_path: Path) -> None:
    stored = (IMAGES / PLOTS[section].file).read_text()
    made_by = re.search(r"Matplotlib v([\d.]+)", stored)
    assert made_by is not None
    if made_by[1] != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {made_by[1]}; another draws other paths")
    drawn = draw_section(section, folder=tmp_path)
    assert drawn is not None
    assert drawn.read_text() == stored, "run `python -m tests.benchmarks.plots`"


@pytest.mark.parametrize("section", PLOTS)
def test_a_plot_stands_on_the_page_and_says_in_words_what_it_shows(section: str) -> None:
    image = re.search(rf"!\[([^\]]+)\]\(images/{re.escape(PLOTS[section].file)}\)", PAGE.read_text())
    assert image is not None
    assert len(image[1].split()) > 8
    assert "<text" in (IMAGES / PLOTS[section].file).read_text()


@pytest.mark.parametrize("colour", [GREY, *COLOURS])
@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_colours_stand_out_from_light_and_dark_grounds(colour: str, ground: str) -> None:
    assert contrast(colour, ground) >= (3.5 if colour == GREY else 2.6)


def test_nothing_is_drawn_of_a_section_without_a_plot(tmp_path: Path) -> None:
    assert draw_section("ranges", folder=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_tables_are_read_by_column() -> None:
    text = "words\n\n| a | b |\n| --- | --- |\n| 1 | `x` |\n| 2 | y |\n\nwords\n\n| c |\n|---|\n| 3 |\n"
    assert read_tables(text) == [[{"a": "1", "b": "`x`"}, {"a": "2", "b": "y"}], [{"c": "3"}]]
    assert find_section("<!-- one -->\ntext\n<!-- /one -->", "one") == "text\n"


@pytest.mark.parametrize(("cell", "number"), [("1.44x (1.39–1.48)", 1.44), ("-5.8 / 85.7", -5.8), ("1.3e+04", 13000)])
def test_a_cell_is_the_number_that_it_begins_with(cell: str, number: float) -> None:
    assert read_number(cell) == number
    assert math.isnan(read_number("(cannot be cut)"))
