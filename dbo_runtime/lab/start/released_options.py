"""Which releases of vLLM know an option of `vllm serve`, or a field of what its options describe.

`released_options.json` has those that not all releases know. `python -m dbo_runtime.lab.start.released_options
RELEASE=FOLDER ...` writes it, from the sources of each release: `tools/vllm_classes.py` gets those.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

DATA = Path(__file__).with_suffix(".json")
ARGUMENT_FILES = ("engine/arg_utils.py", "entrypoints/*/cli_args.py")  # patterns: releases have them elsewhere
_OPTION = re.compile(r"--[a-z][a-z0-9-]+")


def find_releases(name: str) -> tuple[str, ...]:
    """Return the releases that know an option (`--name`) or a field (`name`, `outer.name`).

    Empty if all releases know it, or none.
    """
    known: dict[str, list[str]] = json.loads(DATA.read_text(encoding="utf-8"))["options"]
    return tuple(known.get(name if name.startswith("--") else name.rpartition(".")[2], ()))


def list_options(package: Path) -> set[str]:
    """Return all options and fields that the source of a vLLM *package* declares."""
    fields = {name for path in sorted((package / "config").rglob("*.py")) for name in _list_fields(path)}
    files = [path for pattern in ARGUMENT_FILES for path in sorted(package.glob(pattern))]
    options = {f"--{name.replace('_', '-')}" for path in files for name in _list_fields(path)}
    written = {text for path in files for text in _list_texts(path) if _OPTION.fullmatch(text)}
    return fields | options | written


def compare_releases(options: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return, for each option that not all releases know, those that do."""
    names = sorted(set().union(*options.values()))
    known = {name: [release for release, has in options.items() if name in has] for name in names}
    return {name: releases for name, releases in known.items() if len(releases) < len(options)}


def _list_fields(path: Path) -> Iterator[str]:
    """Yield the fields of the classes that a file declares."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id


def _list_texts(path: Path) -> Iterator[str]:
    """Yield the strings in a file: some options are written out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def main(words: Sequence[str]) -> None:
    """Write the data from `RELEASE=FOLDER`, where FOLDER holds a package `vllm`."""
    folders = dict(word.split("=", 1) for word in words)
    known = compare_releases({release: list_options(Path(folder) / "vllm") for release, folder in folders.items()})
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(releases)}" for name, releases in known.items())
    DATA.write_text(
        f'{{\n  "releases": {json.dumps(list(folders))},\n  "options": {{\n{rows}\n  }}\n}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
