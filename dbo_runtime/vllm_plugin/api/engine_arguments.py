"""The arguments of vLLM's engine on a command line, parsed by vLLM itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dbo_runtime.vllm_plugin.api.serve_command import report_errors

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def parse_engine_arguments(program: str, model: str, words: Sequence[str]) -> EngineArgs:
    """Return the engine's arguments for *model* that *words* ask for, such as `--tensor-parallel-size 2`.

    Raises:
        ConfigError: vLLM does not know a word, or does not accept its value.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=program))
    with report_errors():
        return EngineArgs.from_cli_args(parser.parse_args(["--model", model, *words]))
