"""Prefill and decode on servers of their own, with dual-batch overlap on the prefill node.

Sends the same requests to one unsplit server, and then to a pair: a prefill node, whose steps are all split, and a
decode node, which reads the KV cache from it by NIXL over UCX. Half way the prefill node is killed and started again.
No request may be lost, and all answers must be equal token by token.

    python examples/disaggregated.py --requests 200

NIXL is an extra: pip install 'dbo-runtime[nixl]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from process_group import Program, start_together
from tiny_tasks import training_stream
from two_nodes import find_server

TINY = Path(__file__).resolve().parent / "tiny-deepseek"
STARTS_WITHIN, ANSWERS_WITHIN = 600.0, 300.0  # seconds
SOLVED = 12  # tasks in front of each question, so that there is something to prefill
ON = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always"}
OPTIONS = {
    "dtype": "float32",
    "attention_backend": "CPU_MLA",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 1 << 27,
}
NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
PREFILL_HERE = {"do_remote_decode": True, "do_remote_prefill": False}  # what a router tells the prefill node


class RequestError(Exception):
    """A server did not answer, or not with an answer."""


@dataclass
class Node:
    """One `vllm serve` on loopback.

    Attributes:
        name: of it, and of its log.
        folder: for the log.
        transfer: options of its KV connector; none without.
        settings: further environment variables.
        ranks: tensor parallel ones.
        port: where it listens.
    """

    name: str
    folder: Path
    transfer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    port: int = field(default_factory=lambda: find_free_port())

    def make_program(self) -> Program:
        """Return what to start."""
        more = [f"--kv-transfer-config={json.dumps(self.transfer)}"] if self.transfer else []
        options = {**OPTIONS, "tensor_parallel_size": self.ranks, "host": "127.0.0.1", "port": self.port}
        variables = {
            **os.environ,
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(find_free_port()),
            "UCX_TLS": os.environ.get("UCX_TLS", "tcp"),
            **self.settings,
        }
        return Program(find_server(str(TINY), options, *more), variables, self.folder / f"{self.name}.log")

    def complete(self, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
        """Generate greedily; return the server's answer.

        Raises:
            RequestError: if there is none.
        """
        body = {"model": str(TINY), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._ask("/v1/completions", {**body, "return_token_ids": True, **more})
        found: dict[str, Any] = json.loads(answer)
        if found["choices"][0]["finish_reason"] not in ("length", "stop"):
            raise RequestError(f"{self.name}: {found['choices'][0]['finish_reason']}")
        return found

    def is_healthy(self) -> bool:
        """Return whether it answers."""
        try:
            self._ask("/health")
        except RequestError:
            return False
        return True

    def count(self, metric: str, label: str = "") -> float:
        """Return the sum of a metric over its labels, or of those with one label."""
        lines = self._ask("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{") and label in line)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN) as response:
                answer: str = response.read().decode()
                return answer
        except (OSError, urllib.error.URLError) as error:
            raise RequestError(f"{self.name}: {error}") from None


@dataclass
class Router:
    """Sends each request to the prefill node, and then to the decode node; again if one of them fails meanwhile."""

    prefill: Node
    decode: Node
    retried: int = 0
    patience: float = STARTS_WITHIN  # seconds for a request

    def complete(self, prompt: str, tokens: int) -> list[int]:
        """Return the tokens of an answer.

        Raises:
            RequestError: if there is none in time.
        """
        start = time.monotonic()
        while True:
            try:
                first = self.prefill.complete(prompt, 1, kv_transfer_params=PREFILL_HERE)
                answer = self.decode.complete(prompt, tokens, kv_transfer_params=first["kv_transfer_params"])
                return read_tokens(answer)
            except RequestError:
                if time.monotonic() - start > self.patience:
                    raise
                self.retried += 1
                time.sleep(1.0)


def main() -> int:
    """Run one server, then the pair, and compare."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, leave)
    if importlib.util.find_spec("nixl") is None:
        print("error: NIXL is not installed; pip install 'dbo-runtime[nixl]'.", file=sys.stderr)
        return 2
    prompts = make_prompts(arguments.requests)
    with tempfile.TemporaryDirectory() as directory:
        folder = arguments.logs or Path(directory)
        folder.mkdir(exist_ok=True)
        single = Node("single", folder, settings={"VLLM_ASCEND_ENABLE_DBO": "0"})
        with serve(single):
            expected = ask(prompts, lambda prompt: read_tokens(single.complete(prompt, arguments.tokens)))
        return run_pair(arguments, folder, prompts, expected)


def leave(*_: Any) -> NoReturn:
    """End as a failure would, so that servers are ended, and let no second signal disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer (default: 12)")
    parser.add_argument(
        "--prefill-ranks", type=int, default=1, help="tensor parallel ranks of the prefill node (default: 1)"
    )
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    return parser.parse_args()


def run_pair(arguments: argparse.Namespace, folder: Path, prompts: Sequence[str], expected: list[list[int]]) -> int:
    """Send all requests to a pair, whose prefill node is killed half way; return 0 if all answers are equal."""
    decode = Node("decode", folder, {**NIXL, "kv_role": "kv_consumer"}, {"VLLM_ASCEND_ENABLE_DBO": "0"})
    prefill = Node("prefill", folder, {**NIXL, "kv_role": "kv_producer"}, ON, arguments.prefill_ranks)
    router = Router(prefill, decode)
    half = len(prompts) // 2
    answered = threading.Semaphore(0)

    def complete(prompt: str) -> list[int]:
        tokens = router.complete(prompt, arguments.tokens)
        answered.release()
        return tokens

    with ThreadPoolExecutor(1) as client, serve(prefill, decode) as (first, _):
        answers = client.submit(ask, prompts, complete)
        try:
            for _ in range(half):
                answered.acquire()
            split = prefill.count("vllm:dbo_steps_total", 'mode="split"')
            os.killpg(first.pid, signal.SIGKILL)
            print(f"killed the prefill node after {half} answers", flush=True)
            with serve(prefill):
                found = answers.result()
                split += prefill.count("vllm:dbo_steps_total", 'mode="split"')
            hits = decode.count("vllm:external_prefix_cache_hits_total")
        finally:
            router.patience = 0.0
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    print(f"identical token by token: {equal} of {len(prompts)} answers")
    print(f"split steps of the prefill node: {split:.0f}")
    print(f"tokens whose KV the decode node read: {hits:.0f}; requests sent again: {router.retried}")
    return 0 if equal == len(prompts) and split and hits else 1


def make_prompts(count: int) -> list[str]:
    """Return prompts of some solved tasks and one that is not, all different."""
    tasks, rng = training_stream(0), random.Random(0)
    prompts = []
    for _ in range(count):
        solved = [next(tasks) for _ in range(rng.randint(SOLVED // 2, SOLVED))]
        prompts.append("".join(f"{task.prompt}{task.answer} " for task in solved) + next(tasks).prompt)
    return prompts


def ask(prompts: Sequence[str], complete: Any, clients: int = 8) -> list[list[int]]:
    """Send prompts from several clients at once; return the tokens of all answers."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(complete, prompts))


def read_tokens(answer: dict[str, Any]) -> list[int]:
    """Return the tokens of a server's answer."""
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@contextmanager
def serve(*nodes: Node) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start nodes, wait until all answer, and end them with all that they started.

    Raises:
        RequestError: if one does not start.
    """
    programs = [node.make_program() for node in nodes]
    with start_together(*programs) as processes:
        deadline = time.monotonic() + STARTS_WITHIN
        for node, program, process in zip(nodes, programs, processes, strict=True):
            while not node.is_healthy():
                if process.poll() is not None or time.monotonic() > deadline:
                    assert program.log is not None, "each node has one"
                    raise RequestError(f"{node.name} did not start:\n{program.log.read_text()[-4000:]}")
                time.sleep(0.5)
        yield processes


def find_free_port() -> int:
    """Return a port of loopback on which nothing listens, and that Linux does not give to clients meanwhile."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    sys.exit(main())
