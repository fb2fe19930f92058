"""The page docs/hardware.md: what each GPU has shown, part by part, and what is ready where none has run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .evidence import Results
from .plan import PARTS, Job, Part
from .record import NOT_HERE

HEAD = """# Hardware

What GPUs have shown, by [the kit](devices.md#what-the-gpu-kit-runs). `make hardware RESULTS=FILE` stores a
`results.json` that a machine with a GPU has written in `tools/gpu_kit/results/`. From all that are there it writes this
page, and the list of what the plugin may call proven on CUDA (`platforms/cuda_evidence.json`).
"""
NOTHING = """**No GPU has run it yet.** All that follows is ready, and was rehearsed where there is none. Times of a
rehearsal mean nothing, and are not shown.
"""
REHEARSED = """A rehearsal runs the same programs with small sizes: on vLLM's CPU build, with gloo in place of NCCL
(`python -m tools.gpu_kit.rehearse`), and on the real torch_npu over the stand-in for CANN (`--device npu`). Within a
part, what needs a GPU says so in its results: FlashAttention 3 and fused experts, compute-sanitizer, MPS.
"""
SHARED = """What is compared is compared over NCCL. Both ranks share one GPU, so times are not those of two; a gain is
told only where MPS gives each of them half of the multiprocessors.
"""
DUMMIES = """Weights are vLLM's dummies, whose best words are nearly ties: rounding decides among them, so other tokens
are no error here. Part `equal` compares answers.
"""
COMMAND = "bash tools/gpu_kit/run.sh .gpu_kit"
MISSING = "-"
SHARE = "communication / computation"
GAINED = ("ms one after the other", "ms overlapped", "ms predicted", "gain", "gain at the bound")
GAINED_FROM = ("ms computing", "ms communicating", "us an instruction")
WAYS = {"unsplit": "unsplit", "split, no overlap": "split in turn", "dual-batch overlap": "overlapped"}


def write_page(all_results: Sequence[Results]) -> str:
    """Return the page."""
    sections = [HEAD, *(NOTHING,) * (not all_results)]
    for results in all_results:
        sections += [describe_machine(results["machine"]), *([results["notes"]] if results.get("notes") else [])]
        sections += [
            describe_part(part, results["parts"][part.name]) for part in PARTS if part.name in results["parts"]
        ]
    parts = make_table(("part", "what it shows"), [(part.name, part.shows) for part in PARTS])
    rows = [(part.name, describe_rehearsal(part, "cpu"), describe_rehearsal(part, "npu")) for part in PARTS]
    rehearsed = make_table(("part", "on vLLM's CPU build", "on the stand-in"), rows)
    return "\n".join(
        [*sections, "## What is ready\n", parts, "## What was rehearsed, and where\n", REHEARSED, rehearsed]
    )


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Return the head of what one machine has shown."""
    versions = ", ".join(
        f"{name} {machine[key]}"
        for name, key in (("driver", "driver"), ("Python", "python"), ("torch", "torch"), ("vLLM", "vllm"))
        if machine.get(key)
    )
    return f"## {machine['chip']}, {machine['date']}\n\n{versions}. `{COMMAND}`\n"


def describe_part(part: Part, found: Mapping[str, Any]) -> str:
    """Return what one part has shown on a machine: when, how it is run again, what failed or was not run, its rows."""
    jobs = found.get("jobs", {})
    commits = ", ".join(dict.fromkeys(str(each.get("commit") or "not known")[:12] for each in jobs.values()))
    when = f"{found.get('at', MISSING)[:16].replace('T', ' ')} UTC"
    lines = [f"### {part.name}: {part.shows}\n", f"{when}, commit {commits}: `{COMMAND} {part.name}`\n"]
    if found.get("failed"):
        lines.append(f"**FAILED**: {escape(found['failed'])}\n")
    if missing := [job.name for job in part.jobs if job.name not in jobs]:
        lines.append(f"Not run: {', '.join(missing)}.\n")
    results = found.get("results")
    if isinstance(results, str):
        lines.append(f"{results}\n")
    elif results:
        lines += ROWS[part.name](results)
    return "\n".join(lines)


def describe_rehearsal(part: Part, device: str) -> str:
    """Return which jobs of a part are rehearsed on a device, and why the others are not."""
    ran = [job for job in part.jobs if device not in job.absent]
    if not ran:
        return f"{NOT_HERE}{part.jobs[0].absent[device]}"
    reasons = dict.fromkeys(job.absent[device] for job in part.jobs if device in job.absent)
    left_out = [f"{_name(part, device, reason)}: {reason}" for reason in reasons]
    return "; ".join([f"{len(ran)} of {len(part.jobs)} jobs", *left_out])


def _name(part: Part, device: str, reason: str) -> str:
    jobs: Iterable[Job] = (job for job in part.jobs if job.absent.get(device) == reason)
    return ", ".join(job.name for job in jobs)


def list_smoke(found: Mapping[str, Any]) -> list[str]:
    """Return rates, and errors of kernels."""
    rates, errors = get(found, "rates"), {name: each for name, each in found.items() if isinstance(each, float)}
    rows = [(name, show(rate)) for name, rate in rates.items()]
    rows += [(f"{name} against torch's", f"relative error {error:.2g}") for name, error in errors.items()]
    return [make_table(("what", "measured"), rows)]


def list_core(found: Mapping[str, Any]) -> list[str]:
    """Return overlap by share, with what it was made of, then single figures, then tests."""
    measured = get(found, "measured")
    shares = [(name.split()[1], each) for name, each in measured.items() if name.startswith("communication ")]
    tables = [
        make_table((SHARE, *keys), [(share, *(show(get(each).get(key)) for key in keys)) for share, each in shares])
        for keys in (GAINED, GAINED_FROM)
    ]
    empty, graph = get(measured, "us an instruction of empty ops"), get(measured, "graph")
    single = [
        ("orders equal to the loop, to the bit", show(len(get(measured, "equal to the loop, to the bit")) or None)),
        ("us an instruction of empty ops", f"{show(empty.get('us'))} ({show(empty.get('stream switches'))} switches)"),
        ("a graph's replay", f"equal: {show(graph.get('equal'))}; {show(graph.get('ms to replay'))} ms of the host, "
         f"{show(graph.get('ms to issue'))} ms issued"),
    ]  # fmt: skip
    tests = [(f"tests of {name}", describe_tests(get(each))) for name, each in found.items() if name != "measured"]
    return [*tables, make_table(("what", "found"), [*single, *sorted(tests)])]


def describe_tests(found: Mapping[str, Any]) -> str:
    """Return how many tests passed."""
    counts = found.get("tests")
    return ", ".join(f"{n} {what}" for what, n in counts.items()) if isinstance(counts, dict) else show(counts)


def list_equal(found: Mapping[str, Any]) -> list[str]:
    """Return a row for each engine."""
    heads = ("engine", "backend", "runner", "graphs", "difference / allowed", "split steps", "equal")
    return [make_table(heads, [describe_engine(name, get(found, name)) for name in sorted(found)])]


def describe_engine(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of one engine; the difference is the largest of a log-probability over all cuts."""
    engine = get(found, "engine")
    compared = [get(each) for key, each in found.items() if key.startswith("split ") and isinstance(each, dict)]
    largest = max((each["largest"] for each in compared), default=None)
    backends = ", ".join(engine.get("backends", ())) or MISSING
    runner, graphs, steps, equal = map(
        show, (engine.get("runner"), engine.get("graphs"), found.get("split steps"), found.get("equal"))
    )
    return name, backends, runner, graphs, f"{show(largest)} / {show(found.get('tolerance'))}", steps, equal


def list_link(found: Mapping[str, Any]) -> list[str]:
    """Return what prefill takes with a link of the measured rate, by model."""
    lines = [DUMMIES]
    for name, each in found.items():
        rate = show(get(each, "link").get("GB/s"))
        lines.append(f"{name}: prefill on one GPU with a link of {rate} GB/s that takes no multiprocessor.\n")
        lines.append(make_times(get(each)))
        lines += draw(get(each, "timeline"))
    return lines


def list_two_ranks(found: Mapping[str, Any]) -> list[str]:
    """Return reduces, answers, and times where MPS divides the GPU."""
    reduces = [(name, f"{show(each.get('ms'))} ms, {show(each.get('GB/s'))} GB/s") for name, each in
               get(found, "pair").items() if name.startswith("all-reduce")]  # fmt: skip
    lines = [SHARED]
    lines.append(make_table(("two processes on one GPU", "NCCL over sockets"), reduces))
    lines += list_equal({"tensor parallel, two nodes": get(found, "equal")})
    halves = found.get("halves")
    if isinstance(halves, dict) and "engine" in halves:
        lines += [f"Times, divided by {show(halves.get('divided by'))}:\n", make_times(halves)]
    else:
        lines.append(f"Times: {show(get(found, 'halves').get('times', halves))}\n")
    return lines


def list_frees(found: Mapping[str, Any]) -> list[str]:
    """Return what the sanitizer has found in schedules, and in the planted fault."""
    names = {"schedules": "schedules as they are", "fault": "a free too early, planted"}
    rows = [
        (
            what,
            show(get(found, key).get("watched by", found.get(key))),
            show(" ".join(get(found, key).get("report", ())[-1:])),
        )
        for key, what in names.items()
    ]
    return [make_table(("what", "watched by", "report"), rows)]


def list_trace(found: Mapping[str, Any]) -> list[str]:
    """Return what `dbo trace` has printed of the profile."""
    said = found.get("said")
    return ["```", *said, "```\n"] if isinstance(said, list) else [f"{show(said)}\n"]


def list_priority(found: Mapping[str, Any]) -> list[str]:
    """Return by how much products delay what communicates, by priority."""
    rows = [(name, *(show(get(each, f"priority {priority}").get("times as long", get(each, f"priority {priority}").get(
             "gain"))) for priority in (0, -1)), show(get(each).get("ratio of both priorities")))
            for name, each in found.items() if isinstance(each, dict)]  # fmt: skip
    heads = ("what (times as long as alone; of the schedule: gain)", "priority 0", "priority -1", "ratio")
    return [make_table(heads, rows)]


def list_auto(found: Mapping[str, Any]) -> list[str]:
    """Return predicted against measured steps, by model."""
    lines = []
    heads = ("prompts", "unsplit: predicted / measured ms", "split: predicted / measured ms", "auto", "faster")
    for name, steps in found.items():
        rows = [
            (prompts, *(compare(each, way) for way in ("unsplit", "split")), show(each["auto"]), show(each["faster"]))
            for prompts, each in get(steps).items()
            if isinstance(each, dict) and "right" in each
        ]
        right = show(get(steps).get("right choices"))
        lines += [f"{name}: right choices: {right}.\n", *([make_table(heads, rows)] if rows else [])]
    return lines


def compare(step: Mapping[str, Any], way: str) -> str:
    """Return what was predicted of a step, and what was measured."""
    return " / ".join(show(get(step, key).get(way)) for key in ("predicted ms", "measured ms"))


def make_times(found: Mapping[str, Any]) -> str:
    """Return a table of prefills in each mode."""
    rows = [(name, *(show(each["ms"].get(way)) for way in WAYS), show(each.get("gain")), show(each.get("same tokens")))
            for name, each in found.items() if isinstance(each, dict) and "ms" in each]  # fmt: skip
    return make_table(("prefill", *(f"{way}, ms" for way in WAYS.values()), "gain", "same tokens"), rows)


def draw(found: Mapping[str, Any]) -> list[str]:
    """Return the lanes of a step, if they were drawn."""
    return ["```", *found["drawn"], "```\n"] if found.get("drawn") else []


def get(found: Any, name: str | None = None) -> Mapping[str, Any]:
    """Return what is under a name, or *found* itself; nothing where a part failed or had no meaning."""
    value = found if name is None else found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, dict) else {}


def show(value: Any) -> str:
    """Return a cell."""
    if value is None or value in ("", {}, []):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def escape(text: str) -> str:
    """Return text that stays in its cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, with an empty line after it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([*lines, ""])


ROWS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = MappingProxyType(
    {
        "smoke": list_smoke,
        "core": list_core,
        "equal": list_equal,
        "frees": list_frees,
        "trace": list_trace,
        "link": list_link,
        "two-ranks": list_two_ranks,
        "priority": list_priority,
        "auto": list_auto,
    }
)
"""What makes the rows of each part."""
