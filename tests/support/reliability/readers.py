"""Every reader of what comes from outside, with inputs that it may be given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from dbo_runtime import __main__ as command_line
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.adapters.registry import check_adapter
from dbo_runtime.batch import Batch, Thresholds, slice_batch
from dbo_runtime.config import list_settings, read_environment
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.render import parse, render
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.doctor.model import check_model
from dbo_runtime.lab.doctor.serve_command import read_command
from dbo_runtime.lab.doctor.settings import check_costs, check_trace
from dbo_runtime.lab.verify.tiny_config import make_config
from dbo_runtime.observe.counts import FOLDER, SHARED, statistics
from dbo_runtime.observe.trace import make_trace
from dbo_runtime.planner.costs.cost_file import load_costs
from dbo_runtime.setting_sources import reread_environment
from tests.support.lab.handmade import make_split_step, make_ubatched_step
from tests.support.observe.recorded_runs import TOY, record_run
from tests.support.programs import lower_toy
from tests.support.reliability.hostile_adapters import make_adapter, make_class
from tests.support.reliability.odd_inputs import ODD_TEXTS, ODD_VALUES, make_json, make_text, spoil
from tests.support.reliability.outcomes import MAX_SECONDS

CASES = ("910b-share-5591", "a3-layer-4894")
SMALL_CASE = "910b-share-5591"


@dataclass(frozen=True)
class Reader:
    """Reads one kind of input.

    Attributes:
        name: of the row in the table.
        make: draws an input: bytes for the file of readers that have one, anything else for others.
        read: reads what `make` returned; for readers of files, the path instead.
        file: the name of its file in a folder; empty for readers of no file.
        valid: the content of a valid file of JSON, if it is one.
        share: of the inputs that this reader gets: each of a command that plans takes a second.
        seconds: of the processor that an input may take; a command that plans also searches.
    """

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any], object]
    file: str = ""
    valid: Any = None
    share: float = 1.0
    seconds: float = MAX_SECONDS


def list_readers() -> list[Reader]:
    """Return all readers that need neither torch nor vLLM."""
    costs, traces, model = (
        _load_cases(),
        _make_traces(),
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {}},
    )
    draft = {**model, "hidden_size": 4096, "num_hidden_layers": 32, "layer_types": ["full"] * 32, "text_config": {}}
    return [
        Reader("cost file", partial(make_json, costs), load_costs, "costs.json", costs[0]),
        Reader("trace", partial(make_json, traces), _summarize, "step.json", traces[0]),
        Reader("profile", partial(make_json, _make_profiles()), _summarize, "profile.json", _make_profiles()[0]),
        Reader("rendered schedule", partial(make_text, [_render()]), _check_schedule, "schedule.txt"),
        Reader("config.json of a model", partial(make_json, [model]), _examine_model, "config.json", model),
        Reader("config.json of a draft", partial(make_json, [draft]), _shrink_model, "config.json", draft),
        Reader("metrics folder", _make_counts, _sum_counts, "counter_dbo1.db"),
        Reader("arguments of plan, render, trace", _make_words, _run_command, share=0.01, seconds=20.0),
        Reader("settings", _make_settings, _read_settings),
        Reader("serve command", _make_command, read_command),
        Reader("adapter", make_adapter, lambda adapter: record_program(adapter, None, None)),  # type: ignore[arg-type]
        Reader("class of an adapter", make_class, lambda cls: check_adapter(cls, "odd:Adapter")),
        Reader("batch and cuts", _make_batch, lambda made: made()),
    ]


def list_plugin_readers() -> list[Reader]:
    """Return those that need vLLM to be imported."""
    return [
        Reader("data of another rank", partial(make_json, [["costs 1", True], {"spans": [], "bound": 1.0}]), _gather),
        Reader("attention metadata", _make_metadata, lambda made: made()),
    ]


@cache
def _load_cases() -> list[Any]:
    folder = files("dbo_runtime.lab.whatif") / "published"
    return [json.loads((folder / f"{name}.json").read_text()) for name in CASES]


@cache
def _make_traces() -> list[Any]:
    return [json.loads(json.dumps(make_trace(lines))) for lines in ({"rank 0": TOY}, {"rank 0": record_run()})]


@cache
def _make_profiles() -> list[Any]:
    return [make_split_step().make(), make_ubatched_step().make()]


def _summarize(path: str) -> None:
    _run_command(["trace", path])


def _run_command(words: list[str]) -> None:
    if command_line.main(words):
        _refuse()


def _refuse() -> None:
    """Say of a command that returned an exit status what it printed: a DboError."""
    raise ConfigError("refused by the command")


@cache
def _render() -> str:
    return render(lower_toy())


def _check_schedule(path: str) -> None:
    from dbo_runtime.outside_files import read_text

    validate(parse(read_text(path, "schedule"), lower_toy().programs))


def _examine_model(path: str) -> None:
    if any(found.state == "fail" for found in check_model(str(Path(path).parent))):
        _refuse()


def _shrink_model(path: str) -> None:
    make_config(str(Path(path).parent))


def _make_counts(chance: Random) -> bytes:
    return spoil(_count(), chance) if chance.random() < 0.9 else chance.randbytes(chance.choice((0, 3, 8, 100)))


@cache
def _count() -> bytes:
    """Return what `prometheus_client` writes for a few counts."""
    import tempfile

    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/counter.db"
        counts = MmapedDict(path)
        for mode in ("split", "unsplit"):
            key = mmap_key("vllm:dbo_steps", "vllm:dbo_steps_total", ["mode"], [mode], "Steps.")
            counts.write_value(key, 1.0, 0.0)
        counts.close()
        return Path(path).read_bytes()[:400]


def _sum_counts(path: str) -> None:
    with patch.dict(os.environ, {FOLDER: str(Path(path).parent), SHARED: ""}):
        statistics()


WORDS = {
    "--tokens": ("1024", "0", "-1", "4194304", "9" * 5000, "1e3", "٣", ""),
    "--requests": ("2", "0", "10000000", "x"),
    "--query-lens": ("8,1,1", ",", "1," * 1000 + "1", "1,-1", "8," + "9" * 30),
    "--decodes": ("4", "0", "4194304", "16384", "x"),
    "--context": ("0", "100", "-1", "4194304", "NaN"),
    "--model": ("deepseek-v3", "x"),
    "--tp": ("2", "3", "65536", "131072", "9" * 5000),
    "--bandwidth": ("2x", "0x", "inf", "9" * 400 + "x", "1e5x", "100GB/s", "." + "0" * 400 + "1x"),
    "--network": ("8:1GB/s:1GB/s", "8", "::", "9" * 5000 + ":1GB/s:1GB/s", "8:1x:1x"),
    "--imbalance": ("1.5", "nan", "inf", "0", "1e308", "x"),
    "--micro-batches": ("2", "auto", "1", "8", "65", "9" * 5000),  # to plan for 64 takes a minute
    "--margin": ("0.1", "nan", "-1", "1e999"),
    "--policy": ("optimal", "staggered:1", "staggered:10000", "staggered:-1", "x"),
    "--side": ("auto", "on", "x"),
}
RENDER_WORDS = ("--micro-batches", "--policy")


def _make_words(chance: Random) -> list[str]:
    command = chance.choice(("plan", "plan", "render", "trace"))
    if command == "trace":
        return [command, chance.choice((*ODD_TEXTS[1:], ".", "/dev/null", "/proc/self/mem"))]
    costs = chance.choice((SMALL_CASE,) * 8 + ("", "x" * 300, "/dev/zero", "..", "a/../b", "-", "x.json", "\ud800"))
    words = [command, "--costs", costs]
    names = RENDER_WORDS if command == "render" else sorted(WORDS)
    for name in chance.sample(names, chance.choice((0, 1, 1, 2))):
        words += [name, chance.choice((*WORDS[name], *ODD_TEXTS[:4]))]
    return words + (["--json"] if chance.random() < 0.3 else [])


VALUES = (
    "0",
    "1",
    "2",
    "auto",
    "always",
    "races",
    "8:16",
    "staggered:3",
    "-1",
    "65",
    "1e999",
    "nan",
    "²",
    "9" * 5000,
    " 1 ",
)


def _make_settings(chance: Random) -> dict[Any, Any]:
    names = [setting.variable for setting in list_settings()]
    odd = ("DBO_MODEE", "DBO_", "DBO_" + "X" * 5000, "PATH", 1, None, "DBO_\ud800")
    made: dict[Any, Any] = {}
    for _ in range(chance.randint(0, 4)):
        name = chance.choice(names) if chance.random() < 0.9 else chance.choice(odd)
        value = chance.choice((*VALUES, *ODD_TEXTS)) if chance.random() < 0.95 else chance.choice(ODD_VALUES)
        made[name] = value
    return made


def _read_settings(made: dict[Any, Any]) -> None:
    config = read_environment(made)
    check_costs(config)
    check_trace(config)
    reread_environment({}, made)


def _make_command(chance: Random) -> list[str]:
    words = ["VLLM_X=1", "vllm", "serve", "model", "--tensor-parallel-size=2", "DBO_MODE=always", "=", "A=", *ODD_TEXTS]
    valid = ["DBO_MODE=always", "vllm", "serve", "model"]
    for _ in range(chance.randint(0, 3)):
        valid.insert(chance.randrange(len(valid) + 1), chance.choice(words))
    return valid[: chance.randint(0, len(valid))] if chance.random() < 0.2 else valid


def _make_batch(chance: Random) -> Callable[[], object]:
    lengths = tuple(chance.choice((0, 1, 1, 2, 7, 300, 10**6)) for _ in range(chance.randint(0, 8)))
    prefill = chance.choice((0, sum(lengths), 10**9))
    batch = Batch(lengths, prefill, chance.random() < 0.5, chance.randint(1, 4), cuts_decodes=chance.random() < 0.5)
    thresholds = Thresholds(chance.choice((1, 256)), chance.choice((0, 64)), chance.choice((0.0, 0.1)))
    parts = chance.choice((2, 3, 64))
    cuts = [chance.choice((-1, 0, 1, 5, sum(lengths), 10**9)) for _ in range(chance.randint(0, 3))]

    def read() -> None:
        thresholds.choose(batch, parts)
        thresholds.choose_data_parallel([max(length, 0) for length in lengths] or [0], parts)
        slice_batch(batch, cuts)

    return read


def _gather(text: bytes) -> None:
    from dbo_runtime.vllm_plugin.parallel import agreement

    group: Any = type("Pair", (), {"world_size": 2})
    with patch.object(agreement, "exchange_bytes", lambda _, own: [own, text]):
        agreement.gather(group, "")


def _make_metadata(chance: Random) -> Callable[[], object]:
    import numpy as np

    from dbo_runtime.vllm_plugin.context.checks import CachedRequests, check_prefix_cache

    lengths = [chance.choice((1, 1, 2, 30)) for _ in range(chance.randint(1, 6))]
    batch = Batch(tuple(lengths), sum(lengths))
    contexts = [chance.choice((0, 0, 16, 100)) for _ in lengths]
    seq_lens = np.array([length + context for length, context in zip(lengths, contexts, strict=True)])
    table = np.array(
        [[chance.randrange(20) for _ in range(chance.choice((10, 10, 1)))] for _ in lengths][:1] * len(lengths)
    )
    cuts = sorted({chance.randrange(1, max(batch.tokens, 2)) for _ in range(chance.randint(1, 3))})

    def read() -> None:
        slices = slice_batch(batch, cuts)
        requests = CachedRequests(np.array(batch.starts), seq_lens, table, 16)
        check_prefix_cache(slices, requests, chance.randint(0, 3), chance.choice((None, 8)))

    return read


@contextmanager
def open_folder(folder: Path) -> Iterator[Callable[[Reader, Any], Callable[[], object]]]:
    """Give a function that returns what reads an input, from a file in *folder* if the reader has one."""

    def prepare(reader: Reader, made: Any) -> Callable[[], object]:
        if not reader.file:
            return partial(reader.read, made)
        path = folder / reader.file
        with suppress(FileNotFoundError):
            path.unlink()
        path.write_bytes(made)
        return partial(reader.read, str(path))

    yield prepare
