"""Write a draft as a separate package, like examples/toy_adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.lab.verify.draft.calls import FUNCTION, Call, Recording
from dbo_runtime.lab.verify.draft.folding import fold
from dbo_runtime.lab.verify.draft.source import AdapterSource, write_head
from dbo_runtime.lab.verify.tiny_config import write_config

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1.0"
description = "An adapter of dbo_runtime for {architecture}"
requires-python = ">=3.10"
dependencies = ["dbo-runtime"]

[project.entry-points."dbo_runtime.adapters"]
{architecture} = "{module}:{name}"

[tool.setuptools]
py-modules = ["{module}"]
"""

TEST = '''\
"""The adapter's program is the model's own forward, unsplit and cut at every token."""

from pathlib import Path

from {module} import {name}

from dbo_runtime.testing import verify_adapter

MODEL = str(Path(__file__).parent)  # where config.json is; weights are random


def test_the_program_is_the_models_own_forward_at_every_cut() -> None:
    verification = verify_adapter(MODEL, {name}())
    assert not verification.mismatches, str(verification)
'''

INCOMPLETE = '''\
    def record(self, p: ProgramBuilder, model: Any, collectives: Any, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, hidden states out.

        To be written, for {reason}.
        """
        raise NotImplementedError("write this from the model's forward: docs/write-an-adapter.md")


# A layer has these modules:
{tree}
#
# The forward calls, in layers 0 and 1:
{calls}
'''


class DraftNames(NamedTuple):
    """The names of a package's parts."""

    architecture: str
    module: str
    name: str

    @classmethod
    def of(cls, architecture: str) -> DraftNames:
        """Return the names for an architecture: `granite_adapter`, `GraniteAdapter`."""
        family = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", architecture) or architecture
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z0-9])|(?<=[A-Z])(?=[A-Z][a-z])", "_", family).lower()
        return cls(architecture, f"{words}_adapter", f"{family}Adapter")


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder exists already."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already, and no draft overwrites anything; name another by --output.")


def write_package(folder: Path, recording: Recording, config: Mapping[str, Any]) -> str | None:
    """Write a package into a new folder.

    Returns:
        The reason why the adapter is only a skeleton; None if it is complete.
    """
    check_folder(folder)
    names = DraftNames.of(recording.architecture)
    source, reason = write_source(recording, names.name)
    folder.mkdir(parents=True)
    (folder / f"{names.module}.py").write_text(source)
    words = {**names._asdict(), "distribution": names.module.replace("_", "-")}
    (folder / "pyproject.toml").write_text(PROJECT.format(**words))
    (folder / f"test_{names.module}.py").write_text(TEST.format(**words))
    write_config(config, folder)
    return reason


def write_source(recording: Recording, name: str) -> tuple[str, str | None]:
    """Return the source of an adapter's module, and the reason why it is only a skeleton; None if it is complete."""
    try:
        if recording.result is None:
            raise ProgramError("the forward does not return hidden states that it computed")
        return AdapterSource(recording, fold(recording), name).write(), None
    except ProgramError as error:
        reason = str(error)
    tree = "\n".join(f"#   {line}" for line in recording.tree.splitlines())
    calls = "\n".join(f"#   {_describe(call)}" for call in recording.calls if call.layer in (0, 1))
    body = INCOMPLETE.format(reason=reason, tree=tree, calls=calls)
    return write_head(recording, name, "") + body, reason


def _describe(call: Call) -> str:
    layer = "" if call.layer is None else f"layer {call.layer}: "
    target = str(call.target).replace("torch.Tensor.", "") if call.kind == FUNCTION else str(call.target)
    return f"{layer}{target}{', ends in an all-reduce' if call.reduces else ''}"
