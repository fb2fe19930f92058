"""Write a draft of an adapter for a model that vLLM runs, and verify it."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import forward_context

from dbo_runtime.errors import ConfigError, DboError, ProgramError
from dbo_runtime.lab.verify.comparing_forward import Verification
from dbo_runtime.lab.verify.draft.calls import Recording
from dbo_runtime.lab.verify.draft.package import DraftNames, check_folder, write_package
from dbo_runtime.lab.verify.draft.recording import record_forward
from dbo_runtime.lab.verify.tiny_config import make_config, write_config
from dbo_runtime.lab.verify.verification import generate, run_model, verify_adapter

PROMPT_TOKENS = (7, 5, 11)  # in all a prime number, which is no size of a model


class Draft(NamedTuple):
    """A draft that was written.

    Attributes:
        folder: of the package.
        module: the file of the adapter.
        reason: why it is only a skeleton; None if it is complete.
        verdict: the outcome of its verification; None if there is nothing to verify, or it failed.
        error: with which it failed; empty if it did not.
    """

    folder: Path
    module: Path
    reason: str | None = None
    verdict: Verification | None = None
    error: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether the adapter is the model's own forward."""
        return self.verdict is not None and not self.verdict.mismatches

    def __str__(self) -> str:
        """Format as lines: what was written, whether it is right, and what to do."""
        lines = [f"written: {self.module}"]
        todo = [line.strip() for line in self.module.read_text().splitlines() if "# TODO" in line]
        lines += [f"  {line}" for line in todo]
        if self.reason is not None:
            lines.append(f"cannot go on: {self.reason}")
            lines.append(
                "Only a skeleton is written. Complete record(): its comments have a layer's modules and calls."
            )
        elif self.error:
            lines += ["does not run:", self.error, "Correct the op that is named, then: " + self._command]
        elif self.verdict is not None and self.verdict.mismatches:
            lines += [str(self.verdict.mismatches[0]), "Correct that op, then: " + self._command]
        else:
            lines += [f"verifies: {self.verdict}", "Read it against the model's forward before you register it."]
        return "\n".join(lines)

    def list_facts(self) -> dict[str, Any]:
        """Return the same for programs."""
        mismatches = [] if self.verdict is None else [one._asdict() for one in self.verdict.mismatches]
        facts = {"module": str(self.module), "verifies": self.is_verified, "mismatches": mismatches}
        return {**facts, "reason": self.reason or self.error or None}

    @property
    def _command(self) -> str:
        return f"pip install --no-build-isolation --no-deps -e {self.folder} && dbo adapter {self.folder}"


def draft_adapter(model: str, output: str | None = None) -> Draft:
    """Write a package with an adapter of a model, and verify that.

    Args:
        model: an architecture, or a directory with a `config.json`.
        output: the folder to be made; by default it is named after the architecture, in the current one.

    Raises:
        ConfigError: if the folder exists, there is no config, or vLLM does not run it.
        ProgramError: if the model has no list of layers.
    """
    config = make_config(model)
    names = DraftNames.of(config["architectures"][0])
    folder = Path(output or names.module)
    check_folder(folder)
    recording = record_model(config)
    reason = write_package(folder, recording, config)
    module = folder / f"{names.module}.py"
    if reason is not None:
        return Draft(folder, module, reason)
    try:
        adapter = getattr(_load(module), names.name)()
        return Draft(folder, module, verdict=verify_adapter(str(folder), adapter))
    except Exception as error:  # noqa: BLE001 - the code that was just written may raise anything
        return Draft(folder, module, error=str(error) if isinstance(error, DboError) else _describe(error))


def record_model(config: Mapping[str, Any]) -> Recording:
    """Return what the forward of a model of this config calls in a prefill.

    Raises:
        ConfigError: if vLLM does not run the model.
        ProgramError: if the model has no list of layers, or no attention.
    """
    architecture = config["architectures"][0]
    recordings: list[Recording] = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, Path(folder))
        try:
            with run_model(folder) as (llm, runner):
                model = runner.get_model()
                forward = model.forward

                def record(input_ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                    context = forward_context.get_forward_context()
                    if context.attn_metadata and not recordings:
                        x = model.embed_input_ids(input_ids)
                        recordings.append(record_forward(model, forward, architecture, x, positions))
                    hidden: torch.Tensor = forward(input_ids, positions, *args, **kwargs)
                    return hidden

                model.forward = record
                generate(llm, PROMPT_TOKENS, steps=1)
        except DboError:
            raise
        except Exception as error:
            raise ConfigError(
                f"vLLM does not run a tiny {architecture}: {_describe(error)}. Name a directory with a config.json "
                "that it runs."
            ) from error
    if not recordings:
        raise ProgramError(
            f"{architecture} ran without attention, which is what steps are split by; it has no adapter."
        )
    return recordings[0]


def _describe(error: Exception) -> str:
    """Return an error with the line that raised it: those of vLLM's assertions have no text."""
    (*_, last) = traceback.extract_tb(error.__traceback__)
    return f"{error!r:.500} ({last.filename}:{last.lineno})"


def _load(file: Path) -> Any:
    """Import the module of a draft."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # so that messages find its source
    spec.loader.exec_module(module)
    return module
