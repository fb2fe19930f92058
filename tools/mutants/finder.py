"""Lets Python import a mutant in the place of its module: in this process, and in those that it starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from .mutations import Mutation, apply_mutation

VARIABLE = "DBO_MUTANT"
ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).with_name("site")  # whose sitecustomize.py each new Python process imports


class MutantFinder(MetaPathFinder):
    """Finds the mutant of one module."""

    def __init__(self, name: str, path: Path, mutation: Mutation) -> None:
        self._name = name
        self._path = path
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the mutant's spec; None for any other module."""
        if fullname != self._name:
            return None
        loader = _MutantLoader(fullname, str(self._path), self._mutation)
        return spec_from_file_location(fullname, self._path, loader=loader)


def put_in(name: str, path: Path, mutation: Mutation) -> None:
    """Let an import of the module find the mutant, here and in Python processes that are started from here."""
    sys.meta_path.insert(0, MutantFinder(name, path, mutation))
    os.environ[VARIABLE] = json.dumps([name, str(path), mutation])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))


def inherit() -> None:
    """Do what the process that started this one asked for by `put_in`."""
    name, path, fields = json.loads(os.environ[VARIABLE])
    sys.meta_path.insert(0, MutantFinder(name, Path(path), Mutation(*fields)))


class _MutantLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutation: Mutation) -> None:
        super().__init__(name, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        """Return the mutant's code, which is kept nowhere."""
        tree = apply_mutation(Path(self.path).read_text(encoding="utf-8"), self._mutation)
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code
