"""Cut random steps anywhere under DBO_CHECK=1, inside vllm-ascend over the stand-in for CANN: none may raise an alarm.

    make false-alarms

writes the section `false-alarms` of docs/reliability.md. The models have experts, and coarse types, in which a step
that is cut rounds otherwise than an unsplit one, and now and then leads a token to other experts.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.standin.cann import cann
from tests.standin.cann.build import build
from tests.support.ascend.engines import ENVIRONMENT, TINY, start
from tests.support.page import ROOT, make_table, tell_section
from tests.support.vllm.engine import Engine, make_prompt

PAGE = ROOT / "docs" / "reliability.md"
COMMAND = "make false-alarms"
CUTS = 2000
AT_A_TIME = 20  # in one call of the engine's process
PROMPTS, SHORTEST, LONGEST = 3, 4, 160  # of a step, and tokens of each
TOKENS = 240  # of a step, at most
SHARED_OUT = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
QUANTIZED = {"quantization": "ascend"}


class Counts(NamedTuple):
    """What came of random cuts.

    Attributes:
        split: steps that were split, and compared.
        rerouted: those that differ from the unsplit step by more than rounding, but not from their pieces.
        alarms: what was said of others.
    """

    split: int
    rerouted: int
    alarms: tuple[str, ...]


def cut_at_random(engine: Engine, rank: int, seed: int, steps: int) -> Counts:
    """Prefill random prompts in *steps* steps, each cut at one or two random tokens, and compared."""
    chance = random.Random(seed)
    engine.configure(DBO_MODE="always", DBO_CHECK="1")
    engine.llm.collective_rpc(count_comparisons)
    before = engine.statistics()[0]["split"]
    for _ in range(steps):
        lengths = [chance.randint(SHORTEST, LONGEST) for _ in range(chance.randint(1, PROMPTS))]
        while sum(lengths) > TOKENS:
            lengths.pop()
        total = sum(lengths)
        engine.cut_at(*sorted(chance.sample(range(2, total - 1), chance.randint(1, 2))))
        engine.generate([make_prompt(length, chance.randrange(1 << 30)) for length in lengths], 1)
    counted: list[Counter[str]] = engine.llm.collective_rpc(end_counting)
    engine.cut_by_settings()
    alarms = tuple(text for each in counted for text in each if text not in ("unsplit", "one after the other"))
    again = max(each["one after the other"] for each in counted)
    return Counts(engine.statistics()[0]["split"] - before, again - len(alarms), alarms)


def count_comparisons(worker: Any) -> None:
    """Count in a worker how steps are compared, and keep alarms, which would end the engine, until `end_counting`."""
    from dbo_runtime.vllm_plugin.step import comparison

    worker.counted, worker.counting = Counter(), ExitStack()
    describe = comparison.describe_difference

    def count(split: Any, again: Any, plan: Any, mode: str = "unsplit", **options: Any) -> str:
        worker.counted[mode] += 1
        difference = describe(split, again, plan, mode, **options)
        if not difference or mode != comparison.PIECES:
            return difference
        worker.counted[difference] += 1
        return ""

    worker.counting.enter_context(patch.object(comparison, "describe_difference", count))


def end_counting(worker: Any) -> Counter[str]:
    """Let alarms end the engine again; return the counts."""
    worker.counting.close()
    counted: Counter[str] = worker.counted
    return counted


def make_models(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Write the models; return their folders and options by title."""
    # Not before the stand-in is there: torch imports torch_npu, which looks for its libraries.
    from tests.support.ascend.modelslim import DYNAMIC, STATIC, quantize_model
    from tests.support.vllm.families import make_family

    moe = make_family("Qwen3MoeForCausalLM", folder / "qwen3-moe", mlp_only_layers=[])
    return {
        "DeepSeek V3, bf16": (TINY, SHARED_OUT),
        "Qwen3-MoE, bf16": (moe, SHARED_OUT),
        "DeepSeek V3, W8A8": (quantize_model(TINY, folder / "deepseek-w8a8", STATIC, DYNAMIC), SHARED_OUT | QUANTIZED),
        "Qwen3-MoE, W8A8": (quantize_model(moe, folder / "moe-w8a8", DYNAMIC, DYNAMIC), SHARED_OUT | QUANTIZED),
    }


def run_model(model: Path, options: dict[str, Any], cuts: int, seed: int = 0) -> Counts:
    """Cut *cuts* random steps of a model."""
    found: list[Counts] = []
    for npus in start(1, model, **options):
        for first in range(0, cuts, AT_A_TIME):
            steps = min(AT_A_TIME, cuts - first)
            found += npus.run(cut_at_random, seed + first, steps, timeout=600)
    return Counts(
        sum(each.split for each in found),
        sum(each.rerouted for each in found),
        tuple(text for each in found for text in each.alarms),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all models; return 1 if there was an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=CUTS, help="steps of all models together")
    parser.add_argument("--write-page", action="store_true", help="write the table to docs/reliability.md")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT, LD_LIBRARY_PATH=str(build()))
    cann.load()
    header = ["model, TP=2 with experts shared out", "split steps", "rerouted by rounding", "false alarms"]
    command = COMMAND if options.cuts == CUTS else f"python -m tests.ascend.false_alarms --cuts {options.cuts}"
    rows, alarms = [], 0
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        for title, (model, of_engine) in models.items():
            counts = run_model(model, of_engine, options.cuts // len(models))
            alarms += len(counts.alarms)
            rows.append([title, counts.split, counts.rerouted, len(counts.alarms)])
            sys.stderr.write("\n".join([*counts.alarms[:3], ""]))
            # What is done is written: a run that is ended has not been in vain.
            tell_section(options.write_page, "false-alarms", command, make_table(header, rows), PAGE)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
