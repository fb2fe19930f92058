"""Arguments of `vllm serve` and of vLLM's engine, parsed by vLLM itself without a server. Read against 0.23 to 0.33."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.start.start_failure import list_problems
from dbo_runtime.lab.start.unknown_arguments import UnknownArgumentsError, check_printed, check_raised

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def make_known_config(arguments: Sequence[str]) -> tuple[VllmConfig, list[str]]:
    """Return the configuration of the *arguments* that vLLM knows, and the names of those that it does not.

    Raises:
        ConfigError: vLLM does not accept an argument that it knows.
    """
    unknown: list[str] = []
    while True:
        try:
            return make_config(arguments), unknown
        except UnknownArgumentsError as error:
            unknown += error.names
            arguments = error.without


def make_config(arguments: Sequence[str]) -> VllmConfig:
    """Return the configuration that `vllm serve` makes from *arguments*. Only needs the model's config.json.

    Raises:
        UnknownArgumentsError: vLLM does not know some of the arguments.
        ConfigError: vLLM does not accept an argument.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    with _report_errors(arguments):
        parsed = parser.parse_args(["serve", *arguments])
        if parsed.model_tag is not None:  # same as in the command itself
            parsed.model = parsed.model_tag
        return AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)


def parse_engine_arguments(program: str, model: str, words: Sequence[str]) -> EngineArgs:
    """Return the engine's arguments for *model* that *words* ask for, such as `--tensor-parallel-size 2`.

    Raises:
        ConfigError: vLLM does not know a word, or does not accept its value.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=program))
    with _report_errors(words):
        return EngineArgs.from_cli_args(parser.parse_args(["--model", model, *words]))


@contextmanager
def _report_errors(arguments: Sequence[str]) -> Iterator[None]:
    """Turn what vLLM raises or prints about *arguments* that it does not accept into a ConfigError."""
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit:  # argparse has printed the reason
        reason = printed.getvalue().strip().rpartition("error: ")[2]
        check_printed(reason, arguments)
        raise ConfigError(reason) from None
    except (ValueError, OSError, NotImplementedError) as error:
        check_raised(error, arguments)
        raise ConfigError(list_problems(error)) from None
