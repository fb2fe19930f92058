"""Random traffic, split against unsplit, over models and layouts: 5,000 requests with each of 2, 3, 4 micro-batches.

    python -m tests.reliability.traffic --write-page

writes the section `traffic` of docs/reliability.md; without the option it is printed only. `--requests 500` is a tenth.

    python -m tests.reliability.traffic --split nano --micro-batches 3 --write-page

runs each op of a step in nano-batches in place of cutting the step, and writes the section `nano-traffic`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share few cores; read when torch is imported

from dbo_runtime.lab.soak.comparison import TOLERANCE
from dbo_runtime.testing import EquivalenceReport, check_equivalence
from tests.support.page import ROOT, make_table, tell_section
from tests.support.vllm.drafters import NGRAM
from tests.support.vllm.engines import TINY
from tests.support.vllm.families import make_family
from tests.support.vllm.lora import make_lora
from tests.support.vllm.vision_families import QWEN3, make_vision_family

PAGE = ROOT / "docs" / "reliability.md"
# The section of the page, and the command that writes it, by DBO_SPLIT.
SECTIONS = {
    "auto": ("traffic", "python -m tests.reliability.traffic --write-page"),
    "nano": ("nano-traffic", "python -m tests.reliability.traffic --split nano --micro-batches 3 --write-page"),
}
REQUESTS = 5000
MICRO_BATCHES = (2, 3, 4)
JOBS = 2  # models and layouts at a time: one rank leaves a core to others
CACHED = {"attention_backend": "CPU_ATTN", "block_size": 32}  # small blocks, so that prefixes are found in the cache
LATENT = {"attention_backend": "CPU_MLA"}  # which reuses no prefix on CPU
EXPERTS = {"data_parallel_size": 2, "enable_expert_parallel": True}
UNCACHED = {"enable_prefix_caching": False}
POOLING = {"attention_backend": "CPU_ATTN", "runner": "pooling"}
WHOLE = {"max_num_batched_tokens": 512}  # prompts whose tokens attend to later ones do not come in chunks
LINEAR = {"attention_backend": "CPU_ATTN", "dtype": "bfloat16", "num_gpu_blocks_override": 40}
ROUNDING = 0.25  # of log-probabilities in bfloat16, all that vLLM's kernels for linear attention take on CPU
MORE_ROUNDING = 0.5  # with experts
SMALL_STATES = {"num_key_value_heads": 4, "head_dim": 128, "linear_num_value_heads": 2}
"""Keys as large as a state after few tokens: so the blocks that states are cached at the ends of are short."""
HOOKED = {
    "kv_transfer_config": {
        "kv_connector": "LayerRecorder",
        "kv_connector_module_path": "tests.support.vllm.layer_recorder",
        "kv_role": "kv_both",
    },
    "num_gpu_blocks_override": 49,
}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


class Case(NamedTuple):
    """A model in a layout, the share of the requests that it is asked [%], and options of vLLM's."""

    title: str
    make: Callable[[Path], Path]
    share: int
    options: dict[str, Any]
    loras: int = 0
    settings: Mapping[str, str] = {}
    tolerance: float = TOLERANCE
    calibrates: bool = False
    first_steps: bool = False


def make_llama(folder: Path) -> Path:
    """Write a dense model."""
    return make_family("LlamaForCausalLM", folder)


def make_moe(folder: Path) -> Path:
    """Write a mixture of experts."""
    return make_family("Qwen3MoeForCausalLM", folder)


def make_vision(folder: Path) -> Path:
    """Write a model that takes images."""
    return make_vision_family(QWEN3, folder)


def make_linear(folder: Path) -> Path:
    """Write a model most of whose layers have linear attention."""
    return make_family("Qwen3_5ForCausalLM", folder, **SMALL_STATES)


def make_linear_moe(folder: Path) -> Path:
    """Write the same with experts, all of which each token goes to: rounding in bfloat16 would choose others."""
    return make_family("Qwen3_5MoeForCausalLM", folder, **SMALL_STATES, num_experts_per_tok=4)


def make_embedding(folder: Path) -> Path:
    """Write a model that is served for embeddings."""
    return make_family("Qwen3ForCausalLM", folder)


def make_bidirectional(folder: Path) -> Path:
    """Write one whose tokens attend to later ones, too: its attention layers have no KV cache."""
    path = make_embedding(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_causal": False}))
    return folder


def get_deepseek(folder: Path) -> Path:
    """Return the trained model with latent attention and experts."""
    return TINY


CASES = (
    Case("Llama, TP=2", make_llama, 6, {**CACHED, "tensor_parallel_size": 2}),
    Case("Llama, one rank", make_llama, 16, CACHED),
    Case("DeepSeek V3, TP=2", get_deepseek, 6, {**LATENT, "tensor_parallel_size": 2}),
    Case("Llama, one rank, two LoRA adapters", make_llama, 8, {**CACHED, **LORA}, loras=2),
    Case("DeepSeek V3, DP=2 with experts", get_deepseek, 4, {**LATENT, **EXPERTS}),
    Case("Qwen3-VL, one rank, images", make_vision, 8, CACHED),
    Case("Qwen3-MoE, DP=2 with experts", make_moe, 4, {**CACHED, **EXPERTS}),
    Case("DeepSeek V3, PP=2", get_deepseek, 6, {**LATENT, "pipeline_parallel_size": 2}),
    Case("Qwen3, one rank, embeddings", make_embedding, 6, {**CACHED, **POOLING}),
    Case("Qwen3, one rank, bidirectional embeddings", make_bidirectional, 6, {**POOLING, **UNCACHED, **WHOLE}),
    Case("Qwen3.5, one rank", make_linear, 3, {**LINEAR, **UNCACHED}, 0, {"DBO_CHECK": "1"}, ROUNDING),
    Case("Qwen3.5-MoE, one rank", make_linear_moe, 3, {**LINEAR, **UNCACHED}, 0, {}, MORE_ROUNDING, first_steps=True),
    Case("Qwen3.5, one rank, prefix caching", make_linear, 4, LINEAR, 0, {}, ROUNDING, calibrates=True),
    Case("Qwen3.5-MoE, DP=2 with experts", make_linear_moe, 4, {**LINEAR, **UNCACHED, **EXPERTS}, 0, {}, MORE_ROUNDING),
    Case(
        "Qwen3.5-MoE, DP=2 with experts, prefix caching",
        make_linear_moe,
        2,
        {**LINEAR, **EXPERTS},
        0,
        {},
        MORE_ROUNDING,
    ),
    Case(
        "DeepSeek V3, DP=2 with experts, layerwise KV connector",
        get_deepseek,
        4,
        {**LATENT, **EXPERTS, **UNCACHED, **HOOKED},
        settings={"DBO_KV_CONNECTORS": "LayerRecorder"},
    ),
    Case(
        "Qwen3-MoE, DP=2 with experts, DBO_CHECK=races", make_moe, 2, {**CACHED, **EXPERTS}, 0, {"DBO_CHECK": "races"}
    ),
    Case("Llama, one rank, costs measured between requests", make_llama, 4, CACHED, calibrates=True),
    Case("Llama, one rank, n-gram drafts", make_llama, 4, {**CACHED, "speculative_config": NGRAM}),
)


def run_case(
    number: int,
    requests: int,
    seed: int,
    micro_batches: Sequence[int],
    rounds: Sequence[int] | None = None,
    split: str = "auto",
) -> EquivalenceReport:
    """Run one case with so many requests, or some rounds of them, and DBO_SPLIT=*split*; print its report."""
    case = CASES[number]
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        model.mkdir()
        loras = [Path(name, f"lora-{number}") for number in range(case.loras)]
        for seed_of_weights, adapter in enumerate(loras):
            adapter.mkdir()
            make_lora(adapter, seed_of_weights)
        report = check_equivalence(
            str(case.make(model)),
            {**case.settings, "DBO_SPLIT": split},
            requests,
            micro_batches,
            seed,
            rounds,
            loras=[str(adapter) for adapter in loras],
            tolerance=case.tolerance,
            calibrates=case.calibrates,
            first_steps=case.first_steps,
            **case.options,
        )
    again = f"python -m tests.reliability.traffic --case '{case.title}' --requests {requests} --seed {seed}"
    again += f" --split {split}"
    repeats = [f"again: {again} --micro-batches {bug.micro_batches} --rounds {bug.round}\n" for bug in report.bugs[:1]]
    sys.stderr.write(f"{case.title}: {report}\n{''.join(repeats)}")  # the folder of the model is gone
    return report


HEADER = (
    "model and layout",
    "micro-batches",
    "requests",
    "steps split",
    "bugs",
    "ties, vLLM's own",
    "worst log-probability difference",
)
EVIDENCE = ("model and layout", "micro-batches", "tokens", "steps unsplit", "preemptions", "aborts", "s")


def make_rows(title: str, report: EquivalenceReport) -> list[list[Any]]:
    """Return a row for each number of micro-batches."""
    rows = []
    for tally in report.tallies:
        counts, found = tally.counts, (tally.ties, tally.own, len(tally.bugs))
        steps = (counts.split + counts.nano, counts.declined.total(), counts.preempted, tally.aborted)
        asked = (tally.micro_batches, tally.requests, tally.tokens)
        rows.append([title, *asked, *steps, *found, tally.largest, round(tally.seconds)])
    return rows


def sum_up(rows: Sequence[Sequence[Any]], parts: int) -> list[Any]:
    """Return the row of all models with that number of micro-batches."""
    some = [row for row in rows if row[1] == parts]
    sums = [sum(row[column] for row in some) for column in range(2, 11)]
    return ["all", parts, *sums, max(row[11] for row in some), sum(row[12] for row in some)]


def tabulate(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the table of what was found, and that of what was served meanwhile."""
    found, served = [], []
    for title, parts, requests, tokens, split, unsplit, preempted, aborted, ties, own, bugs, largest, seconds in rows:
        found.append([title, parts, requests, split, bugs, f"{ties}, {own}", f"{largest:.1e}"])
        served.append([title, parts, tokens, unsplit, preempted, aborted, seconds])
    return [*make_table(HEADER, found), "", *make_table(EVIDENCE, served)]


def describe(reports: Mapping[int, EquivalenceReport], seconds: float) -> list[str]:
    """Return the lines of the section, of the cases that are done, by number."""
    rows = [row for number in sorted(reports) for row in make_rows(CASES[number].title, reports[number])]
    rows += [sum_up(rows, parts) for parts in sorted({row[1] for row in rows})]
    features: Counter[str] = Counter()
    for report in reports.values():
        for tally in report.tallies:
            features.update(tally.features)
    asked = ", ".join(f"{name} {count:,}" for name, count in features.most_common())
    bugs = [f"Bug: {bug}".replace("\n", " ") for report in reports.values() for bug in report.bugs[:3]]
    done = "" if len(reports) == len(CASES) else f"{len(reports)} of {len(CASES)} models and layouts. "
    times = f"{done}{seconds / 60:.0f} minutes, with the starts of engines and the unsplit runs."
    return [*tabulate(rows), "", f"Among the requests were: {asked}.", "", times, *bugs]


def main() -> int:
    """Run all cases, some at a time; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="with each number of micro-batches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=[case.title for case in CASES], help="all of the requests to this one only")
    parser.add_argument("--split", choices=SECTIONS, default="auto", help="DBO_SPLIT of all cases")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument("--rounds", type=int, nargs="+", help="these of one case only")
    parser.add_argument("--jobs", type=int, default=JOBS, help="models and layouts at a time")
    parser.add_argument("--write-page", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    reports: dict[int, EquivalenceReport] = {}
    shares = {number: arguments.requests * case.share // 100 for number, case in enumerate(CASES)}
    if arguments.case is not None:
        shares = {number: arguments.requests for number in shares if CASES[number].title == arguments.case}
    section, command = SECTIONS[arguments.split]
    options = (arguments.seed, arguments.micro_batches, arguments.rounds, arguments.split)
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        asked = {pool.submit(run_case, number, share, *options): number for number, share in shares.items()}
        for done in as_completed(asked):  # what is done is written: a run that is ended has not been in vain
            reports[asked[done]] = done.result()
            lines = describe(reports, time.monotonic() - start)
            tell_section(arguments.write_page, section, command, lines, PAGE)
    return 0 if all(reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
