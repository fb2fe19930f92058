"""The documentation site builds without a warning, its links lead somewhere, and it loads nothing from another host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.public_names import read_public_names
from tests.support.site import build_site

pytestmark = pytest.mark.slow  # building the site takes seconds

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# Of a page, by the document that it is made of; all other documents in docs/ keep their name.
OUTSIDE_DOCS = {"README.md": "index.html", "CONTRIBUTING.md": "CONTRIBUTING.html", "CHANGELOG.md": "CHANGELOG.html"}


@dataclass
class Html(HTMLParser):
    """What a page of the site has that others may link to, links to itself, and loads."""

    text: str
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADED.get(tag) in values:
            self.loads.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, which is built once for all tests."""
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text()) for path in site.rglob("*.html")}


def test_each_document_is_a_page(site: Path) -> None:
    inside = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(inside) > 20
    for name in (*inside, *OUTSIDE_DOCS.values()):
        assert (site / name).is_file(), name
    assert "Dual-batch overlap (DBO) for vLLM" in (site / "index.html").read_text()


def test_each_public_name_is_in_the_reference(pages: dict[Path, Html]) -> None:
    reference = set().union(*(page.anchors for path, page in pages.items() if path.parent.name == "api"))
    for module, names in read_public_names().items():
        if module == "dbo_runtime":  # what it imports from other public modules is on their pages
            assert names <= {anchor.rpartition(".")[2] for anchor in reference}
        else:
            assert {f"{module}.{name}" for name in names} <= reference, module
    for name in ("layers.LayerRecorder.record_decoder", "experts.ExpertsRecorder.record", "collectives.record_reduce"):
        assert f"dbo_models.{name}" in reference


def test_the_reference_has_docstrings(site: Path) -> None:
    assert "Declares the programs of one model family." in (site / "api" / "adapter.html").read_text()
    assert "Run a model in vLLM, and compare its own forward" in (site / "api" / "testing.html").read_text()


def test_links_lead_to_pages_and_anchors(site: Path, pages: dict[Path, Html]) -> None:
    broken = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in (*page.links, *page.loads)
        if not leads_somewhere(link, path, site, pages)
    ]
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert broken == []


def leads_somewhere(link: str, path: Path, site: Path, pages: dict[Path, Html]) -> bool:
    """Return whether a link of the page at *path* leads to a file and an anchor in it; True for other hosts."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = path
    if parts.path:  # the page for unknown addresses has links from the site's root
        base = site if parts.path.startswith("/") else path.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve()
        target = target / "index.html" if target.is_dir() else target
    anchor = unquote(parts.fragment)
    return target.is_file() and (not anchor or target not in pages or anchor in pages[target].anchors)


@pytest.mark.parametrize("word", ["troubleshooting", "faq", "uninstall"])
def test_the_search_finds_what_people_look_for_first(word: str, site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = [entry["location"] for entry in entries if word in entry["title"].lower()]
    assert any(location.startswith("troubleshooting.html") for location in titles)


def test_links_to_files_of_the_repository_are_pages(site: Path) -> None:
    assert 'href="examples/tiny-deepseek/index.html"' in (site / "index.html").read_text()
    assert 'href="examples/toy_adapter/generate.py.html"' in (site / "write-an-adapter.html").read_text()
    shown = (site / "examples" / "toy_adapter" / "generate.py.html").read_text()
    assert "Generate with this folder's model" in re.sub(r"<[^>]+>", "", shown).replace("&#39;", "'")


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Html]) -> None:
    assert [link for page in pages.values() for link in page.loads if is_elsewhere(link)] == []
    assert [link for style in site.rglob("*.css") for link in find_imports(style) if is_elsewhere(link)] == []
    assert not any('class="mermaid"' in page.text for page in pages.values())  # the theme would fetch its renderer


def find_imports(style: Path) -> Iterator[str]:
    text = style.read_text()
    yield from re.findall(r"""url\(["']?([^"')]+)""", text)
    yield from re.findall(r"""@import\s+["']([^"']+)""", text)


def is_elsewhere(link: str) -> bool:
    return not link.startswith("data:") and bool(urlsplit(link).scheme or urlsplit(link).netloc)


def test_lists_and_tables_are_recognized(site: Path, pages: dict[Path, Html]) -> None:
    # mkdocs wants an empty line before them where repository browsers do not.
    missed = re.compile(r"<p>(?:[^<]*\n)?(?:[-*] |\d+\. |\||```|~~~)")
    found = [f"{path.relative_to(site)}: {text}" for path, page in pages.items() for text in missed.findall(page.text)]
    assert found == []


def test_the_site_shows_no_paths_of_this_machine(pages: dict[Path, Html]) -> None:
    assert not any(str(ROOT) in page.text for page in pages.values())
