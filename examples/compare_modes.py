"""Times prefills unsplit, split without overlap, and split with overlap; draws what overlaps. Knows nothing of hosts.

Data parallel engines each call the same functions in the same order, with prompts of their own: vLLM's `generate` ends
on all of them together.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

MODES = {
    "unsplit": {"DBO_MODE": "off"},
    "split, no overlap": {"DBO_MODE": "always", "DBO_POLICY": "sequential"},
    "dual-batch overlap": {"DBO_MODE": "always", "DBO_POLICY": "alternate"},
}


def compare_modes(llm: Any, prefills: list[str], repeat: int, format_ranks: bool = True) -> tuple[str, bool]:
    """Time all modes for each prefill, such as `4x500`; return a table, and whether all modes gave the same tokens."""
    titles = "".join(f"{mode:>22}" for mode in MODES)
    rows = [f"{'prefill':<10}{titles}{'gain':>8}{'by overlap':>12}{'same tokens':>14}"]
    all_same = True
    for prefill in prefills:
        if format_ranks:
            print(f"timing {prefill} ...", file=sys.stderr, flush=True)
        prompts, tokens = map(int, prefill.split("x"))
        times, same = time_modes(llm, prompts, tokens, repeat)
        medians = {mode: statistics.median(seconds) for mode, seconds in times.items()}
        gain, overlap = (medians[mode] / medians["dual-batch overlap"] for mode in ("unsplit", "split, no overlap"))
        cells = "".join(f"{f'{medians[mode]:.3f} s':>22}" for mode in MODES)
        rows.append(f"{prefill:<10}{cells}{gain:>7.2f}x{overlap:>11.2f}x{'yes' if same else 'NO':>14}")
        all_same &= same
    return "\n".join(rows), all_same


def time_modes(llm: Any, prompts: int, tokens: int, repeat: int) -> tuple[dict[str, list[float]], bool]:
    """Time each mode *repeat* times in turn after a round to warm up; return seconds, and whether tokens agree."""
    from vllm import SamplingParams

    given = make_prompts(llm, [tokens] * prompts)
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    answers = set()
    for turn in range(repeat + 1):
        for mode, settings in MODES.items():
            llm.collective_rpc("dbo_configure", args=(settings,))
            start = time.perf_counter()
            outputs = llm.generate(given, sampling, use_tqdm=False)
            if turn:
                times[mode].append(time.perf_counter() - start)
            answers.add(tuple(tuple(output.outputs[0].token_ids) for output in outputs))
    return times, all(gather(llm, [len(answers) == 1]))


def draw_timeline(llm: Any, prompts: int, tokens: int) -> str:
    """Return the lanes of one more prefill with overlap, where they lost time, and which ops ran concurrently."""
    from vllm import SamplingParams

    from dbo_runtime.lab.trace.summary import summarize
    from dbo_runtime.observe.timeline import Timeline

    llm.collective_rpc("dbo_configure", args=(MODES["dual-batch overlap"],))
    llm.collective_rpc("dbo_request_timeline")
    llm.generate(make_prompts(llm, [tokens] * prompts), SamplingParams(max_tokens=1), use_tqdm=False)
    kept = llm.collective_rpc("dbo_timeline")[0]
    if kept is None:
        return "no step was split, so there is no timeline; the reason is in the log above"
    timeline = Timeline.from_dict(kept)
    rows = [
        f"one prefill of {prompts * tokens} tokens, {timeline.duration:.2f} s; digits are micro-batches, dots idle",
        timeline.draw(),
        str(summarize(timeline)),
    ]
    if _find_parallel(llm).data_parallel_size > 1:
        for op in ("dispatch", "combine"):
            experts, attention = (timeline.measure_concurrent_share(op, other) for other in ("experts", "attention"))
            rows.append(
                f"{experts:.1%} of {op} ran behind another micro-batch's experts, {attention:.1%} its attention"
            )
    return "\n".join(rows)


def gather(llm: Any, own: list[Any]) -> list[Any]:
    """Return what all data parallel engines have, in rank order; one alone drives all ranks and has all."""
    if _find_parallel(llm).data_parallel_size == 1:
        return own
    gathered: list[list[Any]] = llm.collective_rpc(_gather_in_worker, args=(own,))[0]
    return [one for engine in gathered for one in engine]


def make_prompts(llm: Any, lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """Return prompts of these lengths, in tokens, that say nothing; others on each data parallel engine."""
    first = len(lengths) * _find_parallel(llm).data_parallel_rank
    return [
        {"prompt_token_ids": [(i * 7 + j * (1 + i) + j * j) % 250 + 3 for j in range(tokens)]}
        for i, tokens in enumerate(lengths, first)
    ]


def _find_parallel(llm: Any) -> Any:
    return llm.llm_engine.vllm_config.parallel_config


def _gather_in_worker(worker: Any, own: list[Any]) -> list[list[Any]]:
    """Run in the worker, which is what the other engines' workers are connected with."""
    from vllm.distributed.parallel_state import get_world_group

    from dbo_runtime.vllm_plugin.parallel.agreement import gather as gather_from_ranks

    return gather_from_ranks(get_world_group(), own)
