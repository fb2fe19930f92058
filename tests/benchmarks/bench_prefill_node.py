"""What overlap brings to a prefill node that is spread over two hosts, while a decode node reads its KV cache.

    python -m tests.benchmarks.bench_prefill_node --write-page
    python -m tests.benchmarks.bench_prefill_node --repeat 1 --requests 2

It makes two network namespaces (as root) joined at --rate, and a DeepSeek-V3 with random weights. The prefill node has
a tensor parallel rank on each; the decode node is on the first host, and gets the KV cache by NIXL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

from examples.process_group import Program, start_together
from examples.two_nodes import OPTIONS, find_server
from tests.benchmarks.measured_hosts import (
    BenchError,
    OneLineParser,
    Setting,
    check_rates,
    count,
    describe_model,
    prepare,
    run_program,
)
from tests.benchmarks.served_hosts import NAME, Server, serve, wait_until_up
from tests.benchmarks.serving_report import ENOUGH, MODES, OFF, SPLIT, TARGET_RATE
from tests.benchmarks.two_hosts_cells import NO_LIMIT
from tests.support.page import make_table, tell_section

MODULE = "python -m tests.benchmarks.bench_prefill_node"
DECODE_PORT = 8001
DECODE_NICE = "10"  # the prefill node is what is measured, and shares a core with it
TOKENS = 2000  # of each prompt, as in bench_serving


@dataclass(frozen=True)
class Run:
    """One run: its mode, seconds until all prompts were prefilled and answered, and steps meanwhile."""

    mode: str
    prefilled: float
    answered: float
    split: int
    unsplit: int


def main() -> int:
    """Measure, print, and write the page if asked."""
    arguments = parse_arguments()
    if find_spec("nixl") is None:
        raise BenchError("NIXL is not installed: pip install 'dbo-runtime[nixl]'")
    with prepare() as setting:
        for host in setting.hosts:
            host.set_rate(None if arguments.rate == NO_LIMIT else arguments.rate)
        runs = list(measure(setting, arguments.requests, arguments.repeat))
    command = " ".join([MODULE, *sys.argv[1:]])
    tell_section(arguments.write_page, "prefill-node", command, write_report(runs, arguments))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        BenchError, NetworkError: if there is something wrong with it.
    """
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default=TARGET_RATE, help=f"of the link (default: {TARGET_RATE})")
    parser.add_argument("--requests", type=count, default=8, help="of each run (default: 8)")
    parser.add_argument("--repeat", type=count, default=ENOUGH, help=f"runs of each mode (default: {ENOUGH})")
    parser.add_argument("--write-page", action="store_true", help="write the figures to docs/benchmarks.md, too")
    arguments = parser.parse_args()
    check_rates([arguments.rate])
    return arguments


def measure(setting: Setting, requests: int, repeat: int) -> Iterator[Run]:
    """Yield runs of each mode in turn, after one of each to warm up.

    Raises:
        BenchError: if a server or the client fails.
    """
    options = {"kv_transfer_config": make_connector("kv_producer")}
    settings = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_CALIBRATE": "1", **share_side_channel(setting)}
    with serve(setting, options, **settings) as prefill, serve_decode(setting) as decode:
        for mode in MODES:
            run_once(setting, prefill, decode, mode, 2)
        for turn in range(repeat):
            for mode in [*MODES][:: 1 if turn % 2 == 0 else -1]:
                run = run_once(setting, prefill, decode, mode, requests)
                print(f"{mode}, {turn + 1} of {repeat}: {run.prefilled:.2f} s", file=sys.stderr, flush=True)
                yield run


def run_once(setting: Setting, prefill: Server, decode: Server, mode: str, requests: int) -> Run:
    """Switch the prefill node to a mode, and send it the requests."""
    prefill.call("dbo_configure", MODES[mode])
    before = prefill.call("dbo_statistics")
    words = [sys.executable, "-m", "tests.benchmarks.prefill_client", prefill.url, decode.url, str(requests)]
    done = subprocess.run(
        setting.hosts[0].command(*words, str(TOKENS)), env=setting.environment(0), capture_output=True, text=True
    )
    if done.returncode:
        raise BenchError(f"the client failed: {(done.stderr.splitlines() or ['no output'])[-1]}")
    after = prefill.call("dbo_statistics")
    unsplit = sum(after["declined"].values()) - sum(before["declined"].values())
    split = sum(after[name] - before[name] for name in SPLIT)
    return Run(mode, **json.loads(done.stdout), split=split, unsplit=unsplit)


@contextmanager
def serve_decode(setting: Setting) -> Iterator[Server]:
    """Start the decode node on the first host, and wait until it answers."""
    host, log = setting.hosts[0], setting.directory / "decode.log"
    options = {**OPTIONS, "served_model_name": NAME, "host": host.address, "port": DECODE_PORT}
    connector = f"--kv-transfer-config={make_connector('kv_consumer')}"
    words = find_server(str(setting.model), options, "--no-enable-prefix-caching", connector)
    variables = setting.environment(0, VLLM_ASCEND_ENABLE_DBO="0", **share_side_channel(setting, 1))
    program = Program(host.command("nice", "-n", DECODE_NICE, *words), variables, log)
    with start_together(program) as nodes:
        server = Server(host, DECODE_PORT)
        wait_until_up(server, nodes, [log])
        yield server


def make_connector(role: str) -> str:
    """Return the options of NIXL in a role."""
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"})


def share_side_channel(setting: Setting, number: int = 0) -> dict[str, str]:
    """Return where a server tells others of its KV cache: all are asked on the first host."""
    port = 5600 + 100 * number
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": setting.hosts[0].address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp",
    }


def write_report(runs: list[Run], arguments: argparse.Namespace) -> list[str]:
    """Return the section's lines of markdown."""
    rows = []
    for mode in MODES:
        own = [run for run in runs if run.mode == mode]
        prefilled, answered = median(run.prefilled for run in own), median(run.answered for run in own)
        reference = median(run.prefilled for run in runs if run.mode == OFF)
        steps = f"{own[-1].split} of {own[-1].split + own[-1].unsplit}"
        rate = arguments.requests * TOKENS / prefilled
        rows.append([mode, f"{rate:.0f}", f"{answered:.1f}", steps, f"{reference / prefilled:.2f}x"])
    return [
        f"A prefill node over two hosts at {arguments.rate}, TP=2, {describe_model()}, with `NixlConnector`, and a "
        f"decode node on the first host; {arguments.requests} prompts of {TOKENS} tokens at once, one token each; a "
        f"core for each host, which all on it shares; medians of {arguments.repeat} runs of each mode, in turns.",
        "",
        *make_table(["mode", "prefill, tokens/s", "all answered, s", "steps split", "prefill / off"], rows),
        "",
        "*off*, *on* and *always* are those of [serving](#serving).",
    ]


if __name__ == "__main__":
    sys.exit(run_program(main))
