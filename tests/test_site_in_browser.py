"""The site in a browser: pages fit a phone's width, and have a dark scheme.

It needs a Chromium (`apt-get install chromium` on Debian; other names are in tests/support/site.py), and is skipped
without. `SITE_SHOTS=FOLDER` keeps the pictures that it takes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.site import SCHEMES, Browser, build_site, find_browser, serve_folder

pytestmark = pytest.mark.slow
PHONE, TABLET, DESK = 390, 820, 1440  # pixels
LEAST = 500  # of a window
SHOWN = ("index.html", "troubleshooting.html", "benchmarks.html", "quickstart-ascend.zh.html")
HARNESS = "frame.html"  # opens pages in a frame of the wanted width: a browser's window has a least width
MEASURE = """<!doctype html><body><iframe id="frame" height="900"></iframe><pre id="out"></pre><script>
const frame = document.getElementById("frame"), found = [];
const open = (page) => new Promise((done) => { frame.onload = done; frame.src = page; });
const wait = (time) => new Promise((done) => setTimeout(done, time));
(async () => {
  frame.style.width = WIDTH + "px";
  for (const page of PAGES) {
    await open(page);
    await wait(100);
    const shown = frame.contentDocument, root = shown.documentElement;
    const tables = [...shown.querySelectorAll(".md-typeset__scrollwrap")];
    const look = frame.contentWindow.getComputedStyle;
    found.push({page, inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth,
      tables: tables.length, wide: tables.filter(each => each.scrollWidth > each.clientWidth + 1).length,
      ground: look(shown.body).backgroundColor, ink: look(shown.querySelector(".md-typeset")).color});
  }
  document.getElementById("out").textContent = JSON.stringify(found);
})();
</script></body>"""
SHOW = """<!doctype html><body style="margin:0"><iframe src="PAGE" style="border:0;width:WIDTHpx;height:HEIGHTpx">
</iframe></body>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return Browser(program, tmp_path_factory.mktemp("profiles"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


@dataclass(frozen=True)
class Ruler:
    """What measures pages of the site in the browser."""

    site: Path
    address: str
    browser: Browser

    def measure(self, pages: Sequence[str], scheme: str, width: int) -> list[dict[str, Any]]:
        """Return what the browser says of each page, opened at a width."""
        (self.site / HARNESS).write_text(MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width)))
        out = re.search(r'<pre id="out">(.*?)</pre>', self.browser.read(self.address + HARNESS, scheme), re.DOTALL)
        assert out is not None
        assert out[1], "the browser did not get through all pages"
        found: list[dict[str, Any]] = json.loads(unescape(out[1]))
        assert [shown["page"] for shown in found] == [*pages]
        assert {shown["inner"] for shown in found} == {width}
        return found

    def shoot(self, page: str, scheme: str, size: tuple[int, int], file: Path) -> None:
        """Write a picture of a page in a frame of that size."""
        width, height = size
        text = SHOW.replace("PAGE", page).replace("WIDTH", str(width)).replace("HEIGHT", str(height))
        (self.site / HARNESS).write_text(text)
        self.browser.shoot(self.address + HARNESS, scheme, (max(width, LEAST), height), file)


@pytest.fixture(scope="module")
def ruler(site: Path, browser: Browser) -> Iterator[Ruler]:
    with serve_folder(site) as address:
        yield Ruler(site, address, browser)


def find_lightness(colour: str) -> float:
    """Return the mean of a colour's parts, from 0 to 1."""
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]
    return sum(parts) / 3 / 255


def test_no_page_is_wider_than_a_phone(ruler: Ruler) -> None:
    pages = sorted(path.relative_to(ruler.site).as_posix() for path in ruler.site.rglob("*.html"))
    found = ruler.measure([page for page in pages if page != HARNESS], "light", PHONE)
    assert len(found) > 40
    assert {shown["page"]: shown["scroll"] for shown in found if shown["scroll"] > PHONE} == {}


@pytest.mark.parametrize("width", [TABLET, DESK])
def test_pages_fit_wider_screens(width: int, ruler: Ruler) -> None:
    found = ruler.measure(SHOWN, "light", width)
    assert {shown["page"]: shown["scroll"] for shown in found if shown["scroll"] > width} == {}


def test_tables_fit_a_desk(ruler: Ruler) -> None:
    found = ruler.measure(["benchmarks.html", "troubleshooting.html", "vllm.html", "settings.html"], "light", DESK)
    assert min(shown["tables"] for shown in found) >= 1
    assert {shown["page"]: shown["wide"] for shown in found if shown["wide"]} == {}


def test_pages_are_dark_where_the_reader_prefers_it_and_their_words_stand_out(ruler: Ruler) -> None:
    light, dark = (ruler.measure(SHOWN, scheme, PHONE) for scheme in ("light", "dark"))
    for on_light, on_dark in zip(light, dark, strict=True):
        assert find_lightness(on_light["ground"]) > 0.9, on_light["page"]
        assert find_lightness(on_dark["ground"]) < 0.2, on_dark["page"]
        assert find_lightness(on_light["ink"]) < 0.4, on_light["page"]
        assert find_lightness(on_dark["ink"]) > 0.6, on_dark["page"]


@pytest.mark.parametrize("page", SHOWN)
def test_pictures_of_pages_differ_by_scheme(page: str, ruler: Ruler, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SITE_SHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for width, height in ((PHONE, 2400), (DESK, 2000)):
        files = {scheme: folder / f"{Path(page).stem}-{width}-{scheme}.png" for scheme in SCHEMES}
        for scheme, file in files.items():
            ruler.shoot(page, scheme, (width, height), file)
        dark, light = (file.read_bytes() for file in files.values())
        assert min(len(dark), len(light)) > 20_000
        assert dark != light
