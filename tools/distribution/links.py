"""Absolute links for a package index, which has only README.md.

In the repository links are relative, so that they work in each checkout and fork. The address of the project is
PROJECT_URL, or else the `origin` that git fetches from. Links lead to one commit, so that the page of an old release
keeps the documents of that release. (hatch-fancy-pypi-readme does the like for hatchling; setuptools has nothing.)
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

LINK = re.compile(r"(`+).*?\1|\]\((?!https?://|mailto:)([^)#\s]*)(#[^)\s]*)?\)", re.DOTALL)  # or code, left alone
PICTURES = (".svg", ".png")
REMOTE = re.compile(r"(?:[^/@:]+@)?(?P<host>[^/@:]+):(?P<path>[^/].*)")  # as scp names a folder on a host
PAGES = {"Documentation": "docs/first-steps.md", "Changelog": "CHANGELOG.md"}


def find_address(environ: Mapping[str, str], origin: str) -> str | None:
    """Return the project's address on the web, without a slash at its end.

    Args:
        environ: variables; PROJECT_URL is the address, if it is set.
        origin: the address that git fetches from, "" for none.

    Returns:
        None if neither names a host. A name or a password in *origin* is left out.

    Raises:
        ValueError: PROJECT_URL is no address.
    """
    given = environ.get("PROJECT_URL", "")
    if given:
        if re.fullmatch(r"https?://[^\s/@]+/\S+", given) is None:
            raise ValueError(f"PROJECT_URL={given} is no address: give https://HOST/OWNER/NAME")
        return given.rstrip("/")
    parts, copied = urlsplit(origin), REMOTE.fullmatch(origin)
    if parts.scheme in ("https", "http", "ssh"):
        host, path = parts.hostname or "", parts.path
    else:
        host, path = (copied["host"], copied["path"]) if copied else ("", "")
    if "." not in host:  # a folder, or a name that only this machine has for a host
        return None
    return f"https://{host}/{path.strip('/').removesuffix('.git')}"


def write_links(folder: Path, address: str, commit: str) -> None:
    """Make links of *folder*'s README.md lead to a commit at *address*, which `pyproject.toml` then names, too."""
    readme, project = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(make_absolute(readme.read_text(), address, commit))
    pages = {name: lead_to(page, address, commit) for name, page in PAGES.items()}
    urls = "".join(f'{name} = "{url}"\n' for name, url in {"Source": address, **pages}.items())
    project.write_text(f"{project.read_text()}\n[project.urls]\n{urls}")


def make_absolute(text: str, address: str, commit: str) -> str:
    """Return the text of README.md with absolute links; a link to one of its own headings leads there, too."""

    def replace(link: re.Match[str]) -> str:
        _, path, anchor = link.groups("")
        return link[0] if link[1] else f"]({lead_to(path or 'README.md', address, commit)}{anchor})"

    return LINK.sub(replace, text)


def lead_to(path: str, address: str, commit: str) -> str:
    """Return the address of a file in a commit: of its page, or of a picture itself.

    GitHub, Gitee, GitCode and others name them alike; GitLab puts a dash before.
    """
    dash = "-/" if "gitlab" in urlsplit(address).netloc else ""
    kind = "raw" if path.endswith(PICTURES) else "blob"
    return f"{address}/{dash}{kind}/{commit}/{posixpath.normpath(path)}"
