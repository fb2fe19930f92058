"""Two hosts and a model to measure on, and a program that measures and leaves nothing of them behind."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from examples.network_hosts import Host, NetworkError, TwoHosts, check_requirements, read_rate
from tests.benchmarks.two_hosts_cells import NO_LIMIT
from tests.benchmarks.workloads import WorkloadError

DEFAULT_FAMILY = "DeepseekV3ForCausalLM"
HIDDEN, LAYERS = 256, 4  # of a model of that family
WIDE = {  # the sizes of others, which compute about as long as they communicate at the default rate
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
MASTER_PORT = 29500  # nothing else listens on a host that was just made


class BenchError(Exception):
    """It cannot be measured, or something broke while it was; the message says what."""


@dataclass(frozen=True)
class Setting:
    """What to measure on, for the length of a `with` block.

    Attributes:
        directory: for files; it is gone afterwards.
        model: a checkpoint.
        hosts: with an unlimited link.
    """

    directory: Path
    model: Path
    hosts: tuple[Host, Host]

    @property
    def master(self) -> str:
        """Where the first node meets the second one."""
        return f"{self.hosts[0].address}:{MASTER_PORT}"

    def environment(self, node: int, **settings: str) -> dict[str, str]:
        """Return the variables of what runs on a host: its own core, temporary files here, and no settings but these.

        How tokens are dispatched (DBO_DISPATCH) is set where the bench is started.
        """
        cores = sorted(os.sched_getaffinity(0))
        given = self.hosts[node].environment(cores[0] if node == 0 else cores[-1])
        ours = {name for name in given if name.startswith("DBO_") and name != "DBO_DISPATCH"}
        kept = {name: value for name, value in given.items() if name not in {*ours, "VLLM_ASCEND_ENABLE_DBO"}}
        level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
        return {**kept, "TMPDIR": str(self.directory), "VLLM_LOGGING_LEVEL": level, **settings}


def describe_model(family: str = DEFAULT_FAMILY) -> str:
    """Return what `prepare` makes, in words."""
    hidden = HIDDEN if family == DEFAULT_FAMILY else WIDE["hidden_size"]
    return f"{family.removesuffix('ForCausalLM')} with random weights (hidden {hidden}, {LAYERS} layers), fp32"


@contextmanager
def prepare(family: str = DEFAULT_FAMILY, **sizes: int) -> Iterator[Setting]:
    """Make hosts and a model, and remove them whatever happens.

    Args:
        family: of the model.
        sizes: of it, in place of the usual ones.

    Raises:
        NetworkError: if this machine or this user cannot.
    """
    check_environment()
    # Short, because vLLM makes sockets in it, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="dbo-") as directory, TwoHosts(None) as hosts:
        from examples.random_deepseek import make_checkpoint
        from tests.support.vllm.families import make_family

        model = Path(directory) / "model"
        if family == DEFAULT_FAMILY:
            make_checkpoint(model, **{"hidden": HIDDEN, "layers": LAYERS, **sizes})
        else:
            make_family(family, model, **{**WIDE, **sizes})
        yield Setting(Path(directory), model, hosts)


def check_environment() -> None:
    """Raise NetworkError or BenchError if nothing can be measured here."""
    check_requirements()
    if find_spec("vllm") is None:
        raise BenchError("vLLM is not installed: `make setup` installs it.")


def check_rates(rates: Sequence[str]) -> None:
    """Raise NetworkError if one of these is no rate of a link, nor `none`."""
    for rate in rates:
        if rate != NO_LIMIT:
            read_rate(rate)


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        """End with that line."""
        raise BenchError(message)


def count(words: str) -> int:
    """Read a number of at least one."""
    if not words.isdecimal() or not int(words):
        raise argparse.ArgumentTypeError(f"{words!r} is not a whole number of at least 1")
    return int(words)


def run_program(main: Callable[[], int]) -> int:
    """Return how *main* ends; what goes wrong is one line, and a signal ends it as an error would."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, _interrupt)
    try:
        return main()
    except (BenchError, NetworkError, WorkloadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: hosts, programs and temporary files are removed.", file=sys.stderr)
        return 130


def _interrupt(*_: Any) -> NoReturn:
    """Let no second signal disturb the removal."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)
    raise KeyboardInterrupt
