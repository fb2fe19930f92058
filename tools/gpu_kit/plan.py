"""What the kit runs: parts in order of importance, each of jobs in processes of their own, each with a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

DEVICES = ("cuda", "cpu", "npu")
"""The GPU, and where the kit is rehearsed: vLLM's CPU build, and the stand-in for CANN."""

NO_VLLM = "the stand-in's environment has no vLLM"
COMPILED = 'compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]}'
GRAPHS = 'compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}'
NO_GRAPHS = "vLLM's CPU build captures no graphs"
NO_SECOND = "vLLM's second model runner needs Triton, which has no CPU"
NO_PRIORITIES = "only CUDA's streams have priorities"
NO_KERNELS = "these kernels need a GPU"


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: unique in its part.
        limit: seconds.
        words: the module under `tools.gpu_kit.parts`, and its arguments besides the result's path and the device.
        environment: variables besides those of all jobs.
        absent: why it is not run, by device.
    """

    name: str
    limit: float
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What is reported under one name.

    Attributes:
        name: of the part.
        waves: jobs that run side by side; a wave starts when the one before has ended.
        shows: what it proves or measures, for the page.
        is_timed: whether it measures times, so that nothing else may run meanwhile.
        builds_up: whether a wave means nothing if the one before has failed.
    """

    name: str
    waves: tuple[tuple[Job, ...], ...]
    shows: str = ""
    is_timed: bool = True
    builds_up: bool = True

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs of all waves."""
        return tuple(job for wave in self.waves for job in wave)


class PlanError(ValueError):
    """A part or a job that there is not."""


def choose_parts(wanted: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """Return the parts that are named, such as `equal`, or `equal/llama` for one job of it; all if none is.

    Raises:
        PlanError: if there is none of that name.
    """
    if not wanted:
        return list(parts)
    known = {part.name: part for part in parts}
    chosen: dict[str, Part] = {}
    for words in wanted:
        name, _, job = words.partition("/")
        if name not in known:
            raise PlanError(f"there is no part {name!r}; there are {', '.join(known)}")
        chosen[name] = known[name] if not job else _keep_job(chosen.get(name), known[name], job)
    return [chosen[part.name] for part in parts if part.name in chosen]


def _keep_job(before: Part | None, part: Part, name: str) -> Part:
    if name not in [job.name for job in part.jobs]:
        raise PlanError(f"part {part.name!r} has no job {name!r}; it has {', '.join(job.name for job in part.jobs)}")
    names = {name, *(job.name for job in before.jobs)} if before is not None else {name}
    waves = (tuple(job for job in wave if job.name in names) for wave in part.waves)
    return replace(part, waves=tuple(wave for wave in waves if wave))


def make_engine(name: str, model: str, *options: str, limit: float = 170, cpu: str = "", **variables: str) -> Job:
    """Return an engine whose split answers are compared with unsplit ones; *cpu* says why the CPU has none."""
    absent = {"npu": NO_VLLM, **({"cpu": cpu} if cpu else {})}
    environment = {"GPU_KIT_PROVEN": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", **variables}
    return Job(name, limit, ("equal", model, *options), environment, absent)


LINK = {"GPU_KIT_PROVEN": "1", "GPU_KIT_LINK": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
PROVEN = {"GPU_KIT_PROVEN": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
VLLM = {"npu": NO_VLLM}
SUITES = ("contract", "streams", "races")

SMOKE = Part(
    "smoke",
    ((Job("smoke", 90, ("smoke",)),),),
    "Programs, packages and rates of the machine; vLLM's kernels, whose libraries the kit cuts to one architecture, "
    "against torch.",
)
CORE = Part(
    "core",
    (
        (Job("measured", 70, ("core",)),),
        tuple(Job(name, 100, ("suite", f"tests/devices/test_{name}.py")) for name in SUITES),
    ),
    "Schedules on real streams against a plain loop, bit by bit; overlap against its bound at four ratios of "
    "communication to computation; what the host needs for an instruction; replays of a captured schedule; the tests "
    "of devices.",
)
EQUAL = Part(
    "equal",
    (
        (
            make_engine("llama", "llama", "--check"),
            make_engine("mla", "deepseek", "--check"),
            make_engine("mla-triton", "deepseek", "attention_backend=TRITON_MLA", cpu=NO_KERNELS),
            make_engine("llama-exact", "llama", "--exact", cpu=NO_KERNELS, VLLM_BATCH_INVARIANT="1"),
            make_engine("mla-exact", "deepseek", "--exact-between", cpu=NO_KERNELS, VLLM_BATCH_INVARIANT="1"),
            make_engine("llama-graphs", "llama", "enforce_eager=false", GRAPHS, cpu=NO_GRAPHS),
            make_engine("llama-compiled", "llama", "enforce_eager=false", COMPILED, cpu=NO_GRAPHS),
            make_engine("llama-second", "llama", cpu=NO_SECOND, VLLM_USE_V2_MODEL_RUNNER="1"),
            make_engine("mla-second", "deepseek", cpu=NO_SECOND, VLLM_USE_V2_MODEL_RUNNER="1"),
        ),
    ),
    "Split answers of vLLM against unsplit ones, cut between and inside requests, under `DBO_CHECK=1` and `races`; to "
    "the bit where vLLM's kernels take no notice of the batch.",
    is_timed=False,
)
FREES = Part(
    "frees",
    (tuple(Job(what, 120, ("frees", what)) for what in ("schedules", "fault")),),
    "Whether memory of one stream is freed while another reads it, by compute-sanitizer on CUDA's own allocator.",
    is_timed=False,
)
TRACE = Part(
    "trace",
    ((Job("trace", 120, ("trace",), LINK, VLLM),),),
    "A profile of a split step, read by `dbo trace`.",
    is_timed=False,
)
LINKED = Part(
    "link",
    (
        (Job("8 layers of 4096", 90, ("link", "wide"), LINK, VLLM),),
        (Job("61 layers of 2048", 90, ("link", "deep"), LINK, VLLM),),
    ),
    "Prefill of vLLM with a link of copies in place of all-reduces: unsplit, split in turn, split and overlapped.",
    builds_up=False,
)
TWO_RANKS = Part(
    "two-ranks",
    (
        (Job("pair", 60, ("pair",), absent={"npu": "its collectives have tests of their own"}),),
        (Job("equal", 140, ("two_ranks", "equal"), PROVEN, VLLM),),
        (Job("halves", 140, ("two_ranks", "halves"), PROVEN, VLLM),),
    ),
    "vLLM with two tensor parallel ranks on one GPU over NCCL: answers; and times if MPS gives each half of it.",
)
PRIORITY = Part(
    "priority",
    (
        (
            Job(
                "priority",
                40,
                ("priority",),
                absent=dict.fromkeys(("cpu", "npu"), NO_PRIORITIES),
            ),
        ),
    ),
    "Whether products starve what communicates, on streams of both priorities.",
)
AUTO = Part(
    "auto",
    (
        (Job("61 layers of 2048", 110, ("auto", "deep"), LINK, VLLM),),
        (Job("8 layers of 4096", 110, ("auto", "wide"), LINK, VLLM),),
    ),
    "Calibration with the link; predicted against measured steps; whether `auto` chooses the faster way.",
    builds_up=False,
)
PARTS = (SMOKE, CORE, EQUAL, FREES, TRACE, LINKED, TWO_RANKS, PRIORITY, AUTO)
"""In order of importance."""
