from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.figure import COLOURS, DPI, WIDTH_INCHES, draw_figure
from dbo_runtime.observe.timeline import Span, Timeline

FIRST, SECOND = COLOURS[:2]
ONE = Timeline((Span("compute", "L0.attention", 0, 7.0, 7.004), Span("comm", "L0.reduce", 0, 7.004, 7.005)))
TWO = Timeline((Span("compute", "L0.attention", 0, 7.0, 7.002), Span("compute", "L0.attention", 1, 7.002, 7.004)))


def read_size(path: Path) -> tuple[int, int]:
    """Return width and height from a PNG's header."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def read_pixels(path: Path) -> Any:
    """Return red, green and blue [height, width, 3], each from 0 to 1."""
    return pytest.importorskip("matplotlib.image").imread(path)[:, :, :3]


def find_pixels(path: Path, colour: str) -> Any:
    """Return which pixels [height, width] have exactly this colour."""
    wanted = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return abs(read_pixels(path) - wanted).max(axis=2) < 1 / 512


def test_the_picture_is_a_png_that_grows_with_its_panels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_figure({"unsplit": ONE}, tmp_path / "one.png", "one")
    draw_figure({"unsplit": ONE, "split": TWO}, str(tmp_path / "two.png"), "two")
    one, two = read_size(tmp_path / "one.png"), read_size(tmp_path / "two.png")
    assert one[0] == two[0] == WIDTH_INCHES * DPI
    assert two[1] > one[1] > DPI


def test_other_timelines_make_another_picture_and_the_same_ones_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, timeline in (("a", ONE), ("b", ONE), ("c", TWO)):
        draw_figure({"split": timeline}, tmp_path / name, "title")
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_panels_share_the_axis_of_time_and_bars_have_their_micro_batchs_colour(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    long = Timeline((Span("compute", "op", 0, 5.0, 5.040),))
    short = Timeline((Span("compute", "op", 1, 0.010, 0.030),))
    draw_figure({"long": long, "short": short}, path, "title")
    assert find_pixels(path, FIRST).sum() == pytest.approx(2 * find_pixels(path, SECOND).sum(), rel=0.02)


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.PDF", b"%PDF"), ("a.figure", b"\x89PNG")])
def test_the_ending_of_the_name_decides_on_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_figure({"x": Timeline((Span("compute", "op", 0, 0, 1),))}, tmp_path / name, "title")
    assert (tmp_path / name).read_bytes().startswith(start)


def test_compute_is_the_upper_row_even_where_another_lane_began(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    draw_figure({"x": Timeline((Span("comm", "a", 1, 0, 1), Span("compute", "b", 0, 1, 2)))}, path, "title")
    tops = [find_pixels(path, colour).any(axis=1).argmax() for colour in (FIRST, SECOND)]
    assert tops[0] < tops[1]


def test_each_of_the_ops_of_61_layers_can_be_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    ops = [Span("compute", f"L{n // 8}.op", n % 2, n * 1e-3, n * 1e-3 + 9e-4) for n in range(61 * 8)]
    draw_figure({"split": Timeline(tuple(ops))}, path, "title")
    for colour in (FIRST, SECOND):
        bars = find_pixels(path, colour)
        row = bars[bars.sum(axis=1).argmax()].astype(int)
        assert (row[1:] > row[:-1]).sum() == 61 * 4


@pytest.mark.parametrize(("count", "outlined"), [(20, True), (488, False)])
def test_only_few_bars_are_outlined(count: int, outlined: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    draw_figure({"x": Timeline(tuple(Span("compute", "op", 0, n, n + 1) for n in range(count)))}, path, "title")
    bars = find_pixels(path, FIRST)
    height = bars.any(axis=1).argmax() + 10  # ten pixels below the bars' upper ends
    within = slice(bars[height].argmax(), None)  # from the first bar's left end
    dark = read_pixels(path)[height, within].sum(axis=1) < 0.5
    assert dark.sum() >= count - 1 if outlined else not dark.any()


@pytest.mark.parametrize("timelines", [{"empty": Timeline(())}, {"empty": Timeline(()), "one": ONE}])
def test_a_timeline_in_which_nothing_ran_is_an_empty_panel(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_figure(timelines, tmp_path / "picture.png", "title")
    assert read_size(tmp_path / "picture.png")[0] == WIDTH_INCHES * DPI


def test_a_figure_of_no_timelines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timelines is empty.*name at least one"):
        draw_figure({}, tmp_path / "picture.png", "title")


def test_a_file_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "missing" / "picture.png"
    with pytest.raises(ConfigError, match=r"No such file or directory.*name a file in a folder that exists") as caught:
        draw_figure({"one": ONE}, path, "title")
    assert str(path) in str(caught.value)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'dbo-runtime\[figure\]'"):
        draw_figure({"one": ONE}, tmp_path / "picture.png", "title")
    assert not (tmp_path / "picture.png").exists()
