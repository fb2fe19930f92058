"""A real `vllm serve` on loopback, for the length of a `with` block."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.process_group import end_group

STARTS_WITHIN = 240.0  # seconds
OPTIONS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-batched-tokens=1024",
    f"--kv-cache-memory-bytes={1 << 27}",
)


@dataclass(frozen=True)
class Server:
    """Where it listens, and what it has logged."""

    port: int
    model: Path
    log: Path

    def complete(self, prompts: Sequence[str], tokens: int = 12) -> list[str]:
        """Ask for all completions at once, so that the server batches them."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, tokens), prompts))

    def scrape(self, name: str) -> dict[str, float]:
        """Return what `/metrics` says of a metric: a value for each text of labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{name}{{")]
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}

    def _complete(self, prompt: str, tokens: int) -> str:
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text


@contextmanager
def serve(model: Path, log: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it with all that it started."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    words = [vllm, "serve", str(model), "--host=127.0.0.1", f"--port={port}", *OPTIONS, *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **environment}
    with (
        log.open("w") as file,
        subprocess.Popen(words, env=variables, stdout=file, stderr=file, start_new_session=True) as process,
    ):
        try:
            _wait_until_healthy(port, process, log)
            yield Server(port, model, log)
        finally:
            end_group(process)


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {STARTS_WITHIN:.0f} s:\n{log.read_text()[-4000:]}")
