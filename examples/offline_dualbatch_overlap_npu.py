"""Generate offline without and with dual-batch overlap, and compare.

Runs the same prompts through an unmodified vLLM twice, each time in a process of its own: first as if dbo_runtime were
not installed, then with VLLM_ASCEND_ENABLE_DBO=1. Prints the answers, whether they are identical token by token, how
many steps were split or not and why, and the lanes of one split step.

On a CPU (the default) it needs nothing but this repository:

    python examples/offline_dualbatch_overlap_npu.py
    python examples/offline_dualbatch_overlap_npu.py --pictures

On Ascend, next to vllm-ascend:

    python examples/offline_dualbatch_overlap_npu.py --device npu --model DIR --tp 16
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from cores import share_cores
from two_hosts import add_node_arguments

TINY = str(Path(__file__).resolve().parent / "tiny-deepseek")
TINY_VISION = str(Path(__file__).resolve().parent / "tiny-qwen-vl")
EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"
PICTURE = re.compile(r"<\|vision_start\|>.*?<\|vision_end\|>")
SHOWN = 12


def main() -> int:
    """Run both modes and report; or, in a child process, one of them."""
    arguments = parse_arguments()
    if arguments.result is not None:
        return generate(arguments)
    if arguments.device == "npu" and importlib.util.find_spec("vllm_ascend") is None:
        print("error: --device npu needs vllm-ascend in this environment; see docs/ascend.md.", file=sys.stderr)
        return 2
    try:
        prompts = read_prompts(arguments.prompts)
    except OSError as error:
        print(f"error: the prompts cannot be read: {error}", file=sys.stderr)
        return 2
    if arguments.pictures and arguments.prompts is not None:
        print("error: --pictures has prompts of its own; leave --prompts out.", file=sys.stderr)
        return 2
    if not prompts:
        print(f"error: {arguments.prompts} has no prompt in it; write one a line.", file=sys.stderr)
        return 2
    if arguments.link != "none":
        import slow_link

        return slow_link.demonstrate(Path(__file__), arguments, prompts)
    with tempfile.TemporaryDirectory() as directory:
        without = run(arguments, Path(directory, "without.json"), {"VLLM_ASCEND_ENABLE_DBO": "0"})
        overlapped = run(
            arguments,
            Path(directory, "with.json"),
            {
                "VLLM_ASCEND_ENABLE_DBO": "1",
                "DBO_MODE": arguments.mode or ("always" if arguments.device == "cpu" else "auto"),
                "DBO_MICRO_BATCHES": str(arguments.micro_batches),
            },
        )
    if without is None or overlapped is None:
        return 1
    return report(arguments, without, overlapped)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "npu"), default="cpu", help="where vLLM runs (default: cpu)")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a checkpoint of a model that has an adapter (default: the tiny trained one next to this file)",
    )
    parser.add_argument("--pictures", action="store_true", help="ask about pictures, with a tiny multimodal model")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="tensor parallel ranks (default: 2)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line (default: tasks the tiny model has learnt)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=24, metavar="N", help="longest answer in tokens (default: 24)"
    )
    parser.add_argument(
        "--mode",
        choices=("auto", "always", "off"),
        help="when the second run splits a step (default: always on cpu, to show how it works; auto on npu)",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=2, metavar="N", help="parts a step is split into (default: 2)"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=2048, metavar="N", help="longest prompt and answer (default: 2048)"
    )
    parser.add_argument("--dtype", help="of the weights (default: float32 on cpu, the model's own on npu)")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="""more arguments of vLLM's LLM, such as '{"enforce_eager": true}'""",
    )
    parser.add_argument(
        "--link",
        choices=("auto", "namespaces", "emulated", "none"),
        help="link between two CPU ranks: between hosts made of network namespaces, emulated, or none, on one host "
        "(default: auto on cpu, the first of these that can be had; none with --pictures and on npu)",
    )
    parser.add_argument("--rate", default="200mbit", help="rate of the link, in the words of tc (default: 200mbit)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    add_node_arguments(parser)
    arguments = parser.parse_args()
    arguments.model = arguments.model or (TINY_VISION if arguments.pictures else TINY)
    if arguments.link is None:
        one_host = arguments.pictures or arguments.device == "npu" or arguments.tp != 2 or arguments.mode is not None
        arguments.link = "none" if one_host else "auto"
    return arguments


def run(arguments: argparse.Namespace, result: Path, settings: dict[str, str]) -> dict[str, Any] | None:
    """Generate in a process of its own, whose environment has *settings*; return what it found, or None."""
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **settings}
    if arguments.device == "cpu":
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", share_cores(arguments.tp))
    mode = "with" if settings["VLLM_ASCEND_ENABLE_DBO"] == "1" else "without"
    print(f"generating {mode} dual-batch overlap ...", file=sys.stderr, flush=True)
    words = [sys.executable, __file__, *sys.argv[1:], "--result", str(result)]
    if subprocess.run(words, env=environment).returncode:
        print(f"error: the run {mode} dual-batch overlap failed; its own message is above.", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def generate(arguments: argparse.Namespace) -> int:
    """Generate once with the settings of the environment and write down answers, time, statistics and lanes."""
    from vllm import LLM, SamplingParams

    on_cpu = arguments.device == "cpu"
    options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28} if on_cpu else {}
    if on_cpu and arguments.model == TINY:
        options["attention_backend"] = "CPU_MLA"  # the one for AMX, where there is AMX, takes no fp32
    if arguments.pictures:
        options["limit_mm_per_prompt"] = {"image": 3, "video": 0}
    options.update(arguments.options)
    llm = LLM(
        arguments.model,
        tensor_parallel_size=arguments.tp,
        dtype=arguments.dtype or ("float32" if on_cpu else "auto"),
        max_model_len=arguments.max_model_len,
        worker_extension_cls=EXTENSION,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **options,
    )
    requests = draw_pictures() if arguments.pictures else [{"prompt": text} for text in read_prompts(arguments.prompts)]
    sampling = SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    llm.generate(requests, sampling, use_tqdm=False)  # first runs allocate and warm up
    llm.collective_rpc("dbo_request_timeline")
    start = time.perf_counter()
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    found = {
        "prompts": [PICTURE.sub("[picture]", request["prompt"]) for request in requests],
        "answers": [output.outputs[0].text for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "seconds": seconds,
        "statistics": llm.collective_rpc("dbo_statistics")[0],
        "encoder": llm.collective_rpc("dbo_encoder_statistics")[0],
        "timeline": llm.collective_rpc("dbo_timeline")[0],
    }
    arguments.result.write_text(json.dumps(found))
    return 0


def read_prompts(file: Path | None) -> list[str]:
    """Return the prompts of a file, or some that the tiny model was not trained on."""
    if file is not None:
        return [line for line in file.read_text().splitlines() if line.strip()]
    from tiny_tasks import held_out

    return [task.prompt for task in held_out(8)]


def draw_pictures() -> list[dict[str, Any]]:
    """Return questions about pictures that the tiny model was not trained on, in the words of vLLM."""
    from tiny_pictures import held_out

    asked = [(each.prompt, {"image": list(each.pictures)} if each.pictures else {}) for each in held_out(SHOWN)]
    return [{"prompt": prompt, "multi_modal_data": pictures} for prompt, pictures in asked]


def report(arguments: argparse.Namespace, without: dict[str, Any], overlapped: dict[str, Any]) -> int:
    """Print the comparison; return 1 if any answer differs."""
    total = len(overlapped["prompts"])
    different = [n for n in range(total) if without["tokens"][n] != overlapped["tokens"][n]]
    print(f"\n{'prompt':<28}answer")
    shown = range(0, total, -(-total // SHOWN))  # some of each kind
    for n in shown:
        print(f"{textwrap.shorten(overlapped['prompts'][n], 26):<28}{textwrap.shorten(overlapped['answers'][n], 60)}")
    if total > len(shown):
        print(f"... and {total - len(shown)} more")
    print(f"\nidentical token by token: {total - len(different)} of {total} answers")
    for n in different[:SHOWN]:
        print(f"  differs: {overlapped['prompts'][n]!r}: {without['answers'][n]!r} -> {overlapped['answers'][n]!r}")
    report_steps("steps", overlapped["statistics"])
    if overlapped["encoder"] is not None:
        report_steps("encoder forwards", overlapped["encoder"])
    report_timeline(overlapped["timeline"])
    print(f"\ntime: {without['seconds']:.2f} s without, {overlapped['seconds']:.2f} s with")
    if arguments.device == "cpu" and arguments.mode is None:
        print(
            "All ranks are on one host, where there is next to no communication to hide. Splitting was forced to show\n"
            "how it works (DBO_MODE=always) and cannot gain here; `auto` would have left every step unsplit.\n"
            "`make demo` shows the gain where there is something to hide."
        )
    return 1 if different else 0


def report_steps(what: str, statistics: dict[str, Any] | None) -> None:
    """Print how many of *what* were split, and why the others were not."""
    if statistics is None:
        print(f"{what}: none were split; the reason is in the log above")
        return
    print(f"{what} split: {statistics['split']}, into {statistics['micro_batches']} micro-batches")
    if statistics.get("nano"):
        print(f"{what} split into nano-batches: {statistics['nano']}")
    for reason, count in statistics["declined"].items():
        print(f"{what} run unsplit: {count}, because: {reason}")


def report_timeline(found: dict[str, Any] | None) -> None:
    """Print the lanes of one split step on the first rank, and where they lost time."""
    if found is None:
        return
    from dbo_runtime.lab.trace.summary import summarize
    from dbo_runtime.observe.timeline import Timeline

    timeline = Timeline.from_dict(found)
    print(f"\none split step, {timeline.duration * 1e3:.1f} ms; digits are micro-batches, dots idle")
    print(timeline.draw())
    print(timeline.table(most=SHOWN))
    print(summarize(timeline))


if __name__ == "__main__":
    sys.exit(main())
