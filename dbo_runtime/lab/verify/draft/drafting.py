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

PROMPT_TOKENS = (7, 5, 11)  # in total a prime number, so that it equals no size of a model


class Draft(NamedTuple):
    """A written draft.

    Attributes:
        folder: folder of the package.
        module: file of the adapter.
        reason: reason why the draft is only a skeleton; None if it is complete.
        verdict: result of its verification; None if there was nothing to verify, or the verification failed.
        error: error of the verification; empty if it did not fail.
    """

    folder: Path
    module: Path
    reason: str | None = None
    verdict: Verification | None = None
    error: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether the adapter equals the model's own forward."""
        return self.verdict is not None and not self.verdict.mismatches

    def __str__(self) -> str:
        """Format as lines: the files written, whether they are right, and what to do next."""
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
            lines += [
                f"verifies: {self.verdict}",
                "Next: read it against the model's forward, register it, verify it once more, and serve:",
                f"  {self._command}",
                "  DBO_ENABLE=1 vllm serve MODEL --tensor-parallel-size 2",
            ]
        return "\n".join(lines)

    def list_facts(self) -> dict[str, Any]:
        """Return the same as data, for programs."""
        mismatches = [] if self.verdict is None else [one._asdict() for one in self.verdict.mismatches]
        facts = {"module": str(self.module), "verifies": self.is_verified, "mismatches": mismatches}
        return {**facts, "reason": self.reason or self.error or None}

    @property
    def _command(self) -> str:
        return f"pip install --no-build-isolation --no-deps -e {self.folder} && dbo adapter {self.folder}"


def draft_adapter(model: str, output: str | None = None) -> Draft:
    """Write a package with an adapter for a model, and verify it.

    Args:
        model: name of an architecture, or a directory with a `config.json`.
        output: the folder to make; by default one named after the architecture, in the current folder.

    Raises:
        ConfigError: the folder exists, there is no config, or vLLM does not run the model.
        ProgramError: the model has no list of layers.
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
    except Exception as error:  # noqa: BLE001 - the new code may raise anything
        return Draft(folder, module, error=str(error) if isinstance(error, DboError) else _describe(error))


def record_model(config: Mapping[str, Any]) -> Recording:
    """Return the calls of the forward of a model with this config in a prefill.

    Raises:
        ConfigError: vLLM does not run the model.
        ProgramError: the model has no list of layers, or no attention.
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
    """Return an error with the line that raised it, because vLLM's assertions have no text."""
    (*_, last) = traceback.extract_tb(error.__traceback__)
    return f"{error!r:.500} ({last.filename}:{last.lineno})"


def _load(file: Path) -> Any:
    """Import the module of a draft."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # lets messages find its source
    spec.loader.exec_module(module)
    return module
