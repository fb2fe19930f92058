"""A vLLM engine and what the tests ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zmq

from tests.support.vllm.process_groups import keep_groups

EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"
VOCABULARY = 320

LogProbs = list[dict[int, float]]


@dataclass
class Answer:
    """What one prompt gave: tokens, and the log-probability of every word of the vocabulary at each of them."""

    tokens: list[int]
    log_probs: LogProbs


class Engine:
    """An `LLM` over the tiny model, in float32, that gives all log-probabilities.

    Args:
        model: the folder of the model.
        ranks: how many tensor parallel ranks of each stage.
        context: what makes the processes of its workers, if it has any; without, vLLM spawns them.
        options: for `LLM`.
    """

    def __init__(self, model: Path, ranks: int, context: BaseContext | None = None, **options: Any) -> None:
        from vllm import LLM
        from vllm.v1.executor import multiproc_executor

        if "attention_config" in options:
            allow_types()
        defaults = {
            "tensor_parallel_size": ranks,
            "dtype": "float32",
            "attention_backend": "CPU_MLA",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 27,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 128,
            "max_logprobs": VOCABULARY,
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        with nullcontext() if context is None else patch.object(multiproc_executor, "get_mp_context", lambda: context):
            self.llm = LLM(str(model), **{**defaults, **options})
        self.known: dict[str, Any] = {}  # answers that tests compare with, by what was asked

    def configure(self, **settings: str) -> None:
        """Change settings from the next step on, such as DBO_MODE="off"."""
        self.llm.collective_rpc("dbo_configure", args=(settings,))

    def cut_at(self, *cuts: int | list[int]) -> None:
        """Cut every step at these tokens, where it can be; data parallel ranks take a list for each of them."""
        self.llm.collective_rpc("dbo_cut_at", args=(list(cuts),))

    def cut_by_settings(self) -> None:
        """Return to the settings' own cuts."""
        self.llm.collective_rpc("dbo_cut_at", args=(None,))

    def statistics(self) -> list[dict[str, Any]]:
        """Return the counts of each rank."""
        found: list[dict[str, Any]] = self.llm.collective_rpc("dbo_statistics")
        for of_rank in filter(None, found):
            del of_rank["caches"]  # which depend on what ran before
        return found

    def count_split(self) -> int:
        """Return how many steps were split so far; all ranks must agree."""
        counts = {rank["split"] for rank in self.statistics()}
        assert len(counts) == 1
        return int(counts.pop())

    def generate(
        self, prompts: Sequence[Any], tokens: int = 1, arrive: Sequence[int] = (), loras: Sequence[Any] = ()
    ) -> list[Answer]:
        """Generate greedily from prompts, of tokens or as vLLM takes them; return all log-probabilities.

        With *arrive*, prompt i is added only after that many steps, so that steps mix decodes and prefills. With
        *loras*, it uses the i-th of these adapters, or none where that is None.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=VOCABULARY)
        engine = self.llm.llm_engine
        waiting = {i: (arrive[i] if arrive else 0) for i in range(len(prompts))}
        finished: dict[int, Answer] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            for i in [i for i, when in waiting.items() if when <= step]:
                given = prompts[i] if isinstance(prompts[i], dict) else {"prompt_token_ids": list(prompts[i])}
                engine.add_request(str(i), given, sampling, lora_request=loras[i] if loras else None)
                del waiting[i]
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = _read_answer(output)
            step += 1
        return [finished[i] for i in range(len(prompts))]

    def generate_in_chunks(self, prompts: Sequence[Sequence[int]], chunk: int) -> list[Answer]:
        """Generate one token of each prompt, in steps of at most *chunk* tokens, which vLLM's scheduler asserts.

        `long_prefill_token_threshold` would not do: from vLLM 0.32 on it does not hold for a request that is alone.
        """
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        with patch.object(scheduler, "max_num_scheduled_tokens", chunk):
            return self.generate(prompts)

    def step_once(self, prompt: Sequence[int]) -> list[Answer]:
        """Run one step, which is the prefill of one prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=VOCABULARY)
        self.llm.llm_engine.add_request("once", {"prompt_token_ids": list(prompt)}, sampling)
        return [_read_answer(output) for output in self.llm.llm_engine.step()]

    def serve(
        self, arrivals: Mapping[int, Sequence[Sequence[int]]], steps: int, tokens: int, log_probs: int = VOCABULARY
    ) -> dict[str, Answer]:
        """Run *steps* turns, in each of which some prompts arrive; return the answers by `turn-number`.

        With no *log_probs* answers have those of their own tokens only, which takes half of the time. Data parallel
        ranks take the same number of turns. One that has nothing to do runs a dummy batch, as in serving.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=log_probs)
        engine = self.llm.llm_engine
        finished: dict[str, Answer] = {}
        for turn in range(steps):
            for number, prompt in enumerate(arrivals.get(turn, ())):
                engine.add_request(f"{turn}-{number}", {"prompt_token_ids": list(prompt)}, sampling)
            if not engine.has_unfinished_requests():  # of any rank: all of them ask
                continue
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = _read_answer(output)
        assert not engine.has_unfinished_requests(), "more steps are needed"
        return finished

    def answer(self, prompts: Sequence[str], tokens: int = 12) -> list[str]:
        """Generate greedily from text; return text."""
        from vllm import SamplingParams

        outputs = self.llm.generate(list(prompts), SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def abort_all(self) -> None:
        """Drop what an error left behind."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        while engine.has_unfinished_requests():
            engine.step()

    @property
    def runner(self) -> Any:
        """The model runner, where the worker is in this process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def close(self) -> None:
        """End the workers, and close the sockets of vLLM's queues to them; the groups of this process stay.

        What holds on to a queue (an empty step of a pipeline, the traceback of a test that failed) leaves its ZeroMQ
        context to a later garbage collection, which waits forever if it comes to the context before open sockets.
        """
        core = self.llm.llm_engine.engine_core
        executor = core.engine_core.model_executor
        queues = [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]
        with keep_groups():
            core.shutdown()
        for queue in filter(None, queues):
            close_sockets(queue)


def close_sockets(queue: Any) -> None:
    """Close the sockets of a queue of vLLM's whose writer or readers have ended."""
    condition = queue._spin_condition
    for owner in filter(None, (queue, condition)):
        for socket in list(vars(owner).values()):
            if isinstance(socket, zmq.Socket):
                socket.close(linger=0)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of some length, different for each seed."""
    return [(seed * 7 + j * (1 + seed) + j * j) % 250 + 3 for j in range(length)]


def find_difference(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Return the largest difference of any log-probability."""
    pairs = ((a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x.log_probs, y.log_probs, strict=True))
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a)


def _read_answer(output: Any) -> Answer:
    completion = output.outputs[0]
    return Answer(
        list(completion.token_ids),
        [{token: entry.logprob for token, entry in position.items()} for position in completion.logprobs],
    )


def allow_types() -> None:
    """Let the platform extend what arguments may say, which `vllm serve` does before it reads them, and `LLM` after."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    current_platform.pre_register_and_update()
