"""The serve commands of a release's tutorials, read from the documentation in its source package.

    python -m tests.support.ascend.tutorials FOLDER FILE.csv

writes a row of facts to FILE.csv for each command on the pages in FOLDER: of features first, then of models. A
command's line is where its block starts. Commands that differ in their place, or in shell variables, only are one row:
the first.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.ascend.recipes import Recipe
from tests.support.ascend.shell_commands import VARIABLE, expand, list_commands, read_options

SERVE = re.compile(
    r"\s*(?:(?:exec|nohup|env|\w+=\S*)\s+)*(?:vllm +serve|python3? +-m +vllm\.entrypoints\S*api_server)\b"
)
PLACEHOLDER = re.compile(r"[<$]|your_|x+$")  # how a name starts that the reader of a page should fill in
SHORT = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
}
# Switches of `--additional-config` by flag, and the environment variables that vllm-ascend had before them.
SWITCHES = {
    "fc1": ("enable_flashcomm1", "VLLM_ASCEND_ENABLE_FLASHCOMM1"),
    "dsacp": ("enable_dsa_cp", ""),
    "fmc2": ("enable_fused_mc2", "VLLM_ASCEND_ENABLE_FUSED_MC2"),
    "shdp": ("enable_shared_expert_dp", ""),
    "layer_sharding": ("layer_sharding", ""),
    "c8": ("enable_sparse_sfa_c8", ""),  # in 0.23: later releases have `--kv-cache-dtype`
    "li_c8": ("enable_sparse_li_c8", ""),  # in 0.23: later releases have `--attention-config`
}
CACHES = {"int8": "c8", "fp8": "fp8"}
ORDER = (
    *("fc1", "dsacp", "fmc2", "eplb", "shdp", "layer_sharding", "eager", "lmhead_tensor_parallel_size", "async"),
    *("c8", "fp8", "li_c8", "li_fp8", "index_cache"),
)


class ServeCommand(NamedTuple):
    """A serve command.

    Attributes:
        place: its page and line.
        model: the model, as the command has it.
        options: the options by their long name with hyphens, and None for those without a value.
        variables: values that its block assigns before it.
    """

    place: tuple[str, int]
    model: str
    options: dict[str, str | None]
    variables: dict[str, str]

    def read(self, option: str) -> str:
        """Return the value of *option*; empty if it has none."""
        return expand(self.options.get(option) or "", self.variables)

    def read_size(self, option: str, default: str = "1") -> str:
        """Return the number of *option*; empty if that is left to a variable."""
        value = self.read(option) if option in self.options else default
        return value if value.isdecimal() else ""

    def read_config(self, option: str) -> dict[str, Any]:
        """Return the JSON of *option*, with the options that set single keys of it."""
        value = VARIABLE.sub("0", self.read(option))
        try:
            config: dict[str, Any] = json.loads(value) if value else {}
        except ValueError as error:
            raise ValueError(f"{self.place}: --{option} is not JSON: {error}") from error
        for name in self.options:
            if name.startswith(f"{option}."):
                config[name.removeprefix(f"{option}.")] = self.read(name)
        return config

    def has(self, option: str) -> bool:
        """Return whether *option*, which needs no value, is on."""
        return option in self.options and is_on(self.options[option] or True)


def read_tutorials(folder: Path) -> list[Recipe]:
    """Return the distinct commands on the pages of a release's tutorials."""
    found: dict[tuple[object, ...], Recipe] = {}
    for page in sorted(folder.rglob("*.md"), key=lambda path: (path.parent.name, path.name)):
        for command in list_serve_commands(page.name, page.read_text(encoding="utf-8")):
            recipe = tell_facts(command)
            has_sizes = "cudagraph_capture_sizes" in command.read_config("compilation-config")  # which, is no fact
            identity = (*recipe._replace(page="", line="", model=command.model), has_sizes)
            found.setdefault(identity, recipe)
    return list(found.values())


def list_serve_commands(page: str, text: str) -> Iterator[ServeCommand]:
    """Yield the serve commands of a page."""
    for line, words, variables in list_commands(text, SERVE):
        start = words.index("serve") + 1 if "vllm" in words else words.index("-m") + 2
        options, others = read_options(words[start:], SHORT)
        model = options.get("model") or (others[0] if others else "")
        yield ServeCommand((page, line), model, options, variables)


def tell_facts(command: ServeCommand) -> Recipe:
    """Return the facts of a command."""
    page, line = command.place
    transfer = command.read_config("kv-transfer-config")
    return Recipe(
        page=page,
        line=str(line),
        model=name_model(expand(command.model, command.variables)),
        tensor_parallel=command.read_size("tensor-parallel-size"),
        data_parallel=command.read_size("data-parallel-size"),
        pipeline_parallel=command.read_size("pipeline-parallel-size"),
        expert_parallel="1" if command.has("enable-expert-parallel") else "0",
        quantization=command.read("quantization"),
        drafter=command.read_config("speculative-config").get("method", ""),
        connectors=",".join(_list_connectors(transfer)),
        kv_role=transfer.get("kv_role", ""),
        flags=" ".join(sorted(_list_flags(command), key=_place_flag)),
        decode_context_parallel=command.read_size("decode-context-parallel-size", ""),
        prefill_context_parallel=command.read_size("prefill-context-parallel-size", ""),
        second_runner=command.variables.get("VLLM_USE_V2_MODEL_RUNNER", ""),
        prefix_caching="off" if command.has("no-enable-prefix-caching") else "",
        cudagraph_mode=command.read_config("compilation-config").get("cudagraph_mode", ""),
    )


def name_model(path: str) -> str:
    """Return the name of a model: the last part of its path, empty if the reader of the page should fill it in."""
    name = path.rstrip("/").rpartition("/")[-1]
    return "" if PLACEHOLDER.match(name) else name


def is_on(value: object) -> bool:
    """Return whether a value, which may be text, switches something on."""
    return str(value).lower() not in ("", "0", "false", "none", "[]")


def write(recipes: Iterable[Recipe], file: Path) -> None:
    """Write rows to a file."""
    file.parent.mkdir(exist_ok=True, parents=True)
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(Recipe._fields)
        writer.writerows(recipes)


def _list_connectors(transfer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a connector's parts, sorted, and its own."""
    parts = transfer.get("kv_connector_extra_config", {}).get("connectors", ())
    yield from sorted(name for part in parts for name in _list_connectors(part))
    if "kv_connector" in transfer:
        yield transfer["kv_connector"]


def _list_flags(command: ServeCommand) -> Iterator[str]:
    additional = command.read_config("additional-config")
    for flag, (key, variable) in SWITCHES.items():
        if is_on(additional.get(key, command.variables.get(variable, ""))):
            yield flag
    balancer = additional.get("eplb_config", {})
    if is_on(balancer.get("dynamic_eplb", "")):
        yield f"eplb{balancer.get('num_redundant_experts') or ''}"
    if is_on(additional.get("finegrained_tp_config", {}).get("lmhead_tensor_parallel_size", "")):
        yield "lmhead_tensor_parallel_size"
    yield from _list_options(command)


def _list_options(command: ServeCommand) -> Iterator[str]:
    """Yield the flags of vLLM's own options."""
    if command.has("enforce-eager"):
        yield "eager"
    if command.has("async-scheduling"):
        yield "async"
    cache = command.read("kv-cache-dtype")
    if cache in CACHES:
        yield CACHES[cache]
    indexer = command.read_config("attention-config").get("indexer_kv_dtype")
    if indexer in CACHES:
        yield f"li_{CACHES[indexer]}"
    if is_on(command.read_config("hf-overrides").get("use_index_cache", "")):
        yield "index_cache"


def _place_flag(flag: str) -> int:
    return ORDER.index("eplb" if flag.startswith("eplb") else flag)


def main(folder: str, file: str) -> None:
    """Write the commands of the tutorials in *folder* to *file*."""
    write(read_tutorials(Path(folder)), Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
