"""Packages that are built from the last commit, checked by twine, and installed into empty environments."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tools.distribution.checkout import check_release, read_address, read_version
from tools.distribution.commands import DistError
from tools.distribution.links import find_address, lead_to, make_absolute
from tools.distribution.packages import make_packages, try_out

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/owner/dbo_runtime"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the wheel and the source package of the last commit, whose project is at ADDRESS."""
    return make_packages(ROOT, tmp_path_factory.mktemp("dist"), ADDRESS)


@pytest.mark.slow
def test_both_packages_install_into_an_empty_environment_and_plan(packages: list[Path]) -> None:
    wheel, source = packages
    version = read_version(ROOT)
    assert (source.name, wheel.name) == (f"dbo_runtime-{version}.tar.gz", f"dbo_runtime-{version}-py3-none-any.whl")
    with tarfile.open(source) as files:
        names = files.getnames()
    assert f"dbo_runtime-{version}/models/deepseek.py" in names
    assert not any("/.venv/" in name or "__pycache__" in name for name in names)
    for package in packages:
        try_out(package)


@pytest.mark.slow
def test_an_index_gets_links_to_files_of_the_commit_and_the_checkout_keeps_its_own(packages: list[Path]) -> None:
    wheel, source = packages
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(files.read(name).decode())
    with tarfile.open(source) as files:
        described = files.extractfile(f"{source.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert described is not None
        assert message_from_string(described.read().decode()).get_payload() == metadata.get_payload()
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert list(urls) == ["Source", "Documentation", "Changelog"]
    assert urls.pop("Source") == ADDRESS
    links = [*find_links(metadata.get_payload()), *urls.values()]
    commit = git(ROOT, "rev-parse", "HEAD")
    committed = set(git(ROOT, "ls-tree", "-r", "--name-only", "HEAD").split("\n"))
    pages, pictures = f"{ADDRESS}/blob/{commit}/", f"{ADDRESS}/raw/{commit}/"
    assert f"{pictures}docs/overlap.svg" in links
    assert f"{pages}docs/vllm.md#what-is-declined" in links
    assert {link.partition("#")[0].removeprefix(pages).removeprefix(pictures) for link in links} <= committed
    relative = find_links(git(ROOT, "show", "HEAD:README.md"))
    assert not any(link.startswith("http") for link in relative)


def find_links(text: str) -> list[str]:
    """Return where links and pictures of a document in Markdown lead."""

    def walk(tokens: list[Token]) -> Iterator[str]:
        for token in tokens:
            yield from (str(token.attrs[name]) for name in ("href", "src") if name in token.attrs)
            yield from walk(token.children or [])

    return list(walk(MarkdownIt().enable("table").parse(text)))


@pytest.mark.parametrize(
    ("link", "absolute"),
    [
        ("[page](docs/a.md)", f"[page]({ADDRESS}/blob/1f/docs/a.md)"),
        ("[part](./docs/a.md#b-c)", f"[part]({ADDRESS}/blob/1f/docs/a.md#b-c)"),
        ("[above](#support)", f"[above]({ADDRESS}/blob/1f/README.md#support)"),
        ("![figure](docs/a.svg)", f"![figure]({ADDRESS}/raw/1f/docs/a.svg)"),
        ("[![figure](a.png)](a.md)", f"[![figure]({ADDRESS}/raw/1f/a.png)]({ADDRESS}/blob/1f/a.md)"),
        ("[away](https://example.org/a)", "[away](https://example.org/a)"),
        ("`d[k](x)` and [k](mailto:a@example.org)", None),
    ],
)
def test_each_kind_of_link_becomes_absolute(link: str, absolute: str | None) -> None:
    assert make_absolute(link, ADDRESS, "1f") == (absolute or link)


def test_gitlab_has_a_dash_before_its_pages() -> None:
    address = "https://gitlab.example.org/owner/name"
    assert lead_to("docs/a.md", address, "1f") == f"{address}/-/blob/1f/docs/a.md"


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://example.org/owner/name.git", "https://example.org/owner/name"),
        ("https://user:secret@example.org/owner/name", "https://example.org/owner/name"),
        ("git@example.org:group/owner/name.git", "https://example.org/group/owner/name"),
        ("ssh://git@example.org:2222/owner/name.git", "https://example.org/owner/name"),
        ("git@a-name-in-ssh-config:owner/name.git", None),
        ("/srv/repositories/name.git", None),
        ("../name", None),
        ("file:///srv/name", None),
        ("", None),
    ],
)
def test_the_address_is_that_of_the_host_that_git_fetches_from(origin: str, address: str | None) -> None:
    assert find_address({}, origin) == address
    assert find_address({"PROJECT_URL": f"{ADDRESS}/"}, origin) == ADDRESS


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout of one commit, which is a release."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2026-01-31)\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--message=One")
    git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.rstrip("\n")


def test_the_address_of_a_checkout_is_that_of_its_origin(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROJECT_URL", raising=False)
    assert read_address(checkout) is None
    git(checkout, "remote", "add", "origin", "git@example.org:owner/name.git")
    assert read_address(checkout) == "https://example.org/owner/name"
    monkeypatch.setenv("PROJECT_URL", "example.org")
    with pytest.raises(DistError, match=r"PROJECT_URL=example\.org is no address: give https://HOST/OWNER/NAME"):
        read_address(checkout)


def test_a_tagged_and_dated_commit_is_a_release(checkout: Path) -> None:
    check_release(checkout)


def test_a_checkout_with_changes_is_no_release(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    with pytest.raises(DistError, match="differs from the last commit"):
        check_release(checkout)


def test_a_commit_without_the_tag_of_its_version_is_no_release(checkout: Path) -> None:
    git(checkout, "tag", "--delete", "v1.2.0")
    git(checkout, "tag", "v1.1.0")
    with pytest.raises(DistError, match=r"no tag v1\.2\.0"):
        check_release(checkout)


def test_a_version_without_a_date_in_the_changelog_is_no_release(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (not released yet)\n")
    git(checkout, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "--message=Two")
    git(checkout, "tag", "--force", "v1.2.0")
    with pytest.raises(DistError, match="no heading"):
        check_release(checkout)


def test_the_changelog_has_a_heading_for_the_version() -> None:
    assert f"\n## {read_version(ROOT)} (" in (ROOT / "CHANGELOG.md").read_text()
