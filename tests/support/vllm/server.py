"""A real `vllm serve` on loopback, for the length of a `with` block."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from examples.process_group import end_group
from examples.tiny_pictures import SLOT, Picture, Question
from tests.support.ports import find_free_ports
from tests.support.vllm.families import find_backend

STARTS_WITHIN = 900.0  # seconds; on an idle machine it takes 20
OPTIONS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=512",
    "--max-num-batched-tokens=1024",
    f"--kv-cache-memory-bytes={1 << 27}",
)


@dataclass(frozen=True)
class Server:
    """Where it listens, what it has logged, and the process that started all of its processes."""

    port: int
    model: Path
    log: Path
    process: int

    def complete(self, prompts: Sequence[str], tokens: int = 12) -> list[str]:
        """Ask for all completions at once, so that the server batches them."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._complete(prompt, tokens), prompts))

    def chat(self, questions: Sequence[Question], tokens: int = 24) -> list[str]:
        """Ask all questions, with their pictures, at once."""
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(lambda question: self._chat(question, tokens), questions))

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Ask for the embeddings of texts [texts][dimensions]."""
        return [each["embedding"] for each in self._post("v1/embeddings", input=[*texts])["data"]]

    def rerank(self, query: str, documents: Sequence[str]) -> dict[str, float]:
        """Ask how relevant documents are; the most relevant comes first."""
        found = self._post("rerank", query=query, documents=[*documents])["results"]
        return {documents[each["index"]]: each["relevance_score"] for each in found}

    def scrape(self, name: str) -> dict[str, float]:
        """Return what `/metrics` says of a metric: a value for each text of labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{name}{{")]
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}

    def _complete(self, prompt: str, tokens: int) -> str:
        text: str = self._ask("completions", prompt=prompt, max_tokens=tokens)["text"]
        return text

    def _chat(self, question: Question, tokens: int) -> str:
        parts = [{"type": "image_url", "image_url": {"url": _encode(picture)}} for picture in question.pictures]
        said = {"type": "text", "text": question.prompt.replace(SLOT, "")}
        message = {"role": "user", "content": [*parts, said]}
        text: str = self._ask("chat/completions", messages=[message], max_tokens=tokens)["message"]["content"]
        return text

    def _ask(self, path: str, **body: Any) -> Any:
        return self._post(f"v1/{path}", temperature=0, **body)["choices"][0]

    def _post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=json.dumps({"model": str(self.model), **body}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)


@contextmanager
def serve(model: Path, log: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it with all that it started."""
    port = find_free_ports(1)
    vllm = str(Path(sys.executable).with_name("vllm"))
    (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
    backend = f"--attention-backend={find_backend(architecture)}"
    words = [vllm, "serve", str(model), "--host=127.0.0.1", f"--port={port}", backend, *OPTIONS, *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **environment}
    process = _start(words, variables, log, port)
    try:
        yield Server(port, model, log, process.pid)
    finally:
        end_group(process)


def _start(words: Sequence[str], variables: Mapping[str, str], log: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers; once more, if another process took a port that vLLM had chosen.

    With data parallel vLLM looks for free ports long before its workers bind them.
    """
    for _ in range(2):
        with log.open("w") as file:
            process = subprocess.Popen(words, env=variables, stdout=file, stderr=file, start_new_session=True)
        try:
            _wait_until_healthy(port, process, log)
        except BaseException as error:
            end_group(process)
            if not isinstance(error, RuntimeError) or "ddress already in use" not in log.read_text():
                raise
        else:
            return process
    raise RuntimeError(f"twice a port was taken:\n{_quote(log)}")


def _quote(log: Path) -> str:
    """Return what *log* says first of an error, and its end: with many processes, the cause is far above."""
    text = log.read_text()
    cause = max(text.find("Traceback"), 0)
    return f"{text[cause : cause + 6000]}\n...\n{text[-2000:]}"


def _encode(picture: Picture) -> str:
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{_quote(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {STARTS_WITHIN:.0f} s:\n{_quote(log)}")
