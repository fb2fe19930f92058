"""The site in a browser: pages fit a phone's width, have a dark scheme, and look as in the pictures that are stored.

It needs a Chromium (`apt-get install chromium` on Debian; other names are in tests/support/site.py), and is skipped
without. `SITE_SHOTS=FOLDER` keeps the pictures that it takes. Where pages are meant to look otherwise, `python -m
tests.support.site_pictures --write` stores how.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.site import ROOT, SCHEMES, Browser, find_browser, serve_folder
from tests.support.site_pictures.comparison import STORED, find_fault
from tests.support.site_pictures.views import HARNESS as VIEWS_HARNESS
from tests.support.site_pictures.views import SAMPLE, VIEWS, View, build_pages, shoot

pytestmark = pytest.mark.slow
PHONE, TABLET, LAPTOP, DESK = 390, 820, 1280, 1440  # pixels
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
    build_pages(folder)
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


def list_pages(site: Path) -> list[str]:
    """Return all pages of the site; the sample is none of them."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    sample = Path(SAMPLE).parent.as_posix()
    return [page for page in pages if page not in (HARNESS, VIEWS_HARNESS) and not page.startswith(f"{sample}/")]


def test_no_page_is_wider_than_a_phone(ruler: Ruler) -> None:
    found = ruler.measure(list_pages(ruler.site), "light", PHONE)
    assert len(found) > 40
    assert {shown["page"]: shown["scroll"] for shown in found if shown["scroll"] > PHONE} == {}


@pytest.mark.parametrize("width", [TABLET, DESK])
def test_pages_fit_wider_screens(width: int, ruler: Ruler) -> None:
    found = ruler.measure(SHOWN, "light", width)
    assert {shown["page"]: shown["scroll"] for shown in found if shown["scroll"] > width} == {}


def test_tables_fit_a_laptop(ruler: Ruler) -> None:
    found = ruler.measure(list_pages(ruler.site), "light", LAPTOP)
    assert sum(shown["tables"] for shown in found) > 100
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


def find_faults(views: Sequence[View], ruler: Ruler) -> dict[View, str]:
    """Return in what views of one scheme differ from the stored pictures, if they do."""
    pictures = shoot(views, ruler.site, ruler.address, ruler.browser)
    if "SITE_SHOTS" in os.environ:
        for view, picture in zip(views, pictures, strict=True):
            picture.save(Path(os.environ["SITE_SHOTS"], f"{view.name}.png"))
    found = {view: find_fault(view, picture) for view, picture in zip(views, pictures, strict=True)}
    return {view: fault for view, fault in found.items() if fault}


def list_views(scheme: str) -> list[View]:
    return [view for view in VIEWS if view.scheme == scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_look_as_in_the_stored_pictures(scheme: str, ruler: Ruler) -> None:
    assert [*find_faults(list_views(scheme), ruler).values()] == [], "see the docstring of this file"


def test_pages_with_other_words_look_as_in_the_stored_pictures(ruler: Ruler) -> None:
    views = [replace(view, is_reworded=True) for view in list_views("light") if view.page != SAMPLE]
    assert find_faults(views, ruler) == {}


MISTAKES = {
    "no margins beside text": ".md-sidebar { display: none !important }",
    "half as wide": ".md-grid { max-width: 40rem !important }",
    "words in the colour of the ground": ".md-typeset { color: var(--md-default-bg-color) !important }",
    "no colours": "* { background: none !important; color: inherit !important }",
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("page", [SAMPLE, "quickstart-ascend.html"])
def test_a_layout_that_is_broken_is_noticed(page: str, scheme: str, ruler: Ruler) -> None:
    views = [view for view in list_views(scheme) if view.page == page]
    broken = {style: [replace(view, style=style) for view in views] for style in MISTAKES.values()}
    faults = find_faults([view for each in broken.values() for view in each], ruler)
    missed = [name for name, style in MISTAKES.items() if not set(broken[style]) & faults.keys()]
    assert missed == []


def test_each_rule_of_the_site_is_seen_in_the_sample(ruler: Ruler) -> None:
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "docs" / "site.css").read_text(), flags=re.DOTALL)
    rules = [rule.strip() for rule in re.findall(r"[^{}]+(?=\{)", text)]
    assert len(rules) >= 5
    views = [view for view in list_views("light") if view.page == SAMPLE]
    without = [[replace(view, left_out=number) for view in views] for number in range(len(rules))]
    faults = find_faults([view for each in without for view in each], ruler)
    missed = [rule for rule, each in zip(rules, without, strict=True) if not set(each) & faults.keys()]
    # Without it a page is wider than a phone, and not its picture; the first test of this file sees that.
    assert missed == ['.md-typeset p:has(> img[src$=".svg"]:only-child)']


def test_stored_pictures_are_small_and_all_are_compared() -> None:
    files = {path.stem: path.stat().st_size for path in STORED.glob("*.png")}
    assert files.keys() == {view.name for view in VIEWS}
    assert sum(files.values()) < 300 * 1024
