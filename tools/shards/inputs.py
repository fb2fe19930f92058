"""The files that the outcome of a shard depends on, and one digest of what is in them.

Those are the files of its tests, each `conftest.py` above them, all modules of this repository that these import, at
once or through others, and the data in the folders of these modules. Text such as "tests.ascend.false_alarms" counts as
an import, because programs are started by such names. Whatever imports vLLM depends on the plugins of `pyproject.toml`,
too: vLLM loads them by itself. What a test reads by its path must be named under `inputs` in `tests/shards.json`.

grimp, which import-linter brings, is no help here: `tests` is no package, and this runs before anything is installed.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from . import catalogue, ledger
from .catalogue import Shard

PACKAGES = MappingProxyType(
    {
        "dbo_models": "models",
        "dbo_runtime": "dbo_runtime",
        "standin_ascend": "tests/standin/ascend",
        "tests": "tests",
        "tools": "tools",
    }
)
"""Where the packages of this repository lie."""

NAME = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
MADE = ("__pycache__", ".pyc", ".egg-info")  # what Python and setuptools leave behind
OWN_FILES = (catalogue.FILE, ledger.FILE)  # they say what is run, not how it ends


class InputFinder:
    """Finds the inputs of shards in one tree, and reads each file once."""

    def __init__(self, root: Path, everywhere: Iterable[str] = ()) -> None:
        self._root = root
        self._everywhere = tuple(everywhere)
        self._modules: dict[Path, tuple[frozenset[Path], bool]] = {}
        self._digests: dict[Path, str] = {}
        self._data: dict[Path, frozenset[Path]] = {}

    def digest(self, shard: Shard) -> str:
        """Name what is in all inputs of a shard, and what it runs."""
        whole = hashlib.sha256(f"{shard.word.text}\n{shard.tests}\n".encode())
        for path in self.find_inputs(shard):
            whole.update(f"{path}\0{self._digest(self._root / path)}\n".encode())
        return whole.hexdigest()[:16]

    def find_inputs(self, shard: Shard) -> list[str]:
        """List the files that a shard depends on, relative to the root."""
        named = [entry.partition("::")[0] for entry in shard.tests]
        named += [*shard.inputs, *shard.word.inputs, *self._everywhere]
        files = {path for entry in named for path in self._list_files(self._root / entry)}
        found = self._close(files | {path for file in files for path in self._find_conftests(file)})
        found |= {path for folder in {file.parent for file in found} for path in self._find_data(folder)}
        paths = {path.relative_to(self._root).as_posix() for path in found}
        return sorted(paths - set(OWN_FILES))

    def _list_files(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        return [each for each in path.rglob("*") if each.is_file() and is_source(each.relative_to(path))]

    def _find_conftests(self, file: Path) -> Iterator[Path]:
        for folder in file.parents:
            if (folder / "conftest.py").is_file():
                yield folder / "conftest.py"
            if folder == self._root:
                return

    def _close(self, files: set[Path]) -> set[Path]:
        found: set[Path] = set()
        left = {*files}
        while left:
            file = left.pop()
            found.add(file)
            imported, imports_vllm = self._read(file)
            left |= (imported | (self._plugins if imports_vllm else frozenset())) - found
        return found

    def _read(self, file: Path) -> tuple[frozenset[Path], bool]:
        """Return the modules that a file imports, and whether it imports vLLM."""
        if file.suffix != ".py":
            return frozenset(), False
        if file not in self._modules:
            names = set(list_imports(file, self._root))
            modules = {path for name in names for path in self._find_modules(name)}
            self._modules[file] = frozenset(modules - {file}), any(name.split(".")[0] == "vllm" for name in names)
        return self._modules[file]

    def _find_modules(self, name: str) -> Iterator[Path]:
        """Yield the files that an import of this name runs."""
        package, *rest = name.split(".")
        if package not in PACKAGES:
            return
        place = self._root / PACKAGES[package]
        for part in ["", *rest]:
            place = place / part
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.is_file():
                    yield file

    @cached_property
    def _plugins(self) -> frozenset[Path]:
        project = self._root / "pyproject.toml"
        names = re.findall(r'= "([\w.]+):\w+"', project.read_text()) if project.is_file() else []
        return frozenset(path for name in names for path in self._find_modules(name))

    def _find_data(self, folder: Path) -> frozenset[Path]:
        """Return the data of modules: files in their folder, and in folders below that hold no module."""
        if folder == self._root:
            return frozenset()
        if folder not in self._data:
            below = [each for each in folder.iterdir() if each.is_dir() and is_source(Path(each.name))]
            apart = [each for each in below if next(each.rglob("*.py"), None) is None]
            files = [each for each in folder.iterdir() if each.is_file() and each.suffix != ".py"]
            files += [path for each in apart for path in self._list_files(each)]
            self._data[folder] = frozenset(file for file in files if is_source(file.relative_to(folder)))
        return self._data[folder]

    def _digest(self, file: Path) -> str:
        if file not in self._digests:
            self._digests[file] = hashlib.sha256(file.read_bytes()).hexdigest()
        return self._digests[file]


def is_source(path: Path) -> bool:
    """Return whether a file may be part of the repository, by its name within a folder."""
    return not any(part.startswith(".") or part.endswith(MADE) for part in path.parts)


def list_imports(file: Path, root: Path) -> Iterator[str]:
    """Yield the names of modules, and of what is in them, that a file imports or has as text."""
    folder = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            base = ".".join([*name_package(above), *([node.module] if node.module else [])])
            yield from (f"{base}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value


def name_package(folder: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name under which a folder is imported, in its parts."""
    for package, place in PACKAGES.items():
        parts = Path(place).parts
        if folder[: len(parts)] == parts and package != "tests":
            return (package, *folder[len(parts) :])
    return folder
