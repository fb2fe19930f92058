"""Hooks by which mkdocs makes pages of files outside docs/: README.md, and whatever a page links to (`mkdocs.yml`).

Links are relative to the file that has them, as repository browsers want them. There may be no public browser to lead
to, so the site has each linked file as a page of its own: documents as they are, others as text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIRST = ROOT / "README.md"
WIDE = ("recipes.md",)  # long names in each column: tables also get the room of the page's contents
LINK = re.compile(r"\]\(([^)#\s]+)")  # up to its anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md, and the files outside docs/ that pages link to, and those that these link to."""
    found = {Path(page.abs_src_path or "") for page in files.documentation_pages()} | {FIRST}
    todo = list(found)
    while todo:
        page = todo.pop()
        if not page.is_relative_to(DOCS):
            files.append(File.generated(config, name_page(page), abs_src_path=str(page)))
        linked = set(find_links(page)) - found
        found |= linked
        todo += sorted(linked)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with links between pages; files that are no documents become blocks of code."""
    source = Path(page.file.abs_src_path or "")
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if source.suffix != ".md":
        return f"# {source.name}\n\n`{source.relative_to(ROOT)}`\n\n~~~~ {source.suffix[1:]}\n{markdown}~~~~\n"
    folder = posixpath.dirname(page.file.src_uri) or "."

    def lead_to_page(link: re.Match[str]) -> str:
        target = resolve(source, link[1])
        return link[0] if target is None else f"]({posixpath.relpath(name_page(target), folder)}"

    return LINK.sub(lead_to_page, markdown)


def find_links(document: Path) -> Iterator[Path]:
    """Yield the files outside docs/ that a document links to."""
    if document.suffix == ".md":
        targets = (resolve(document, link[1]) for link in LINK.finditer(document.read_text()))
        yield from (target for target in targets if target is not None and not target.is_relative_to(DOCS))


def resolve(document: Path, target: str) -> Path | None:
    """Return the file of the repository that a link leads to; None for other links, which mkdocs checks itself."""
    path = Path(posixpath.normpath(document.parent / target))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def name_page(file: Path) -> str:
    """Return what mkdocs calls the page, or the image, that is made of a file."""
    if file == FIRST:
        return "index.md"
    name = file.relative_to(DOCS if file.is_relative_to(DOCS) else ROOT).as_posix()
    return name if file.suffix == ".md" or file.is_relative_to(DOCS) else f"{name}.md"
