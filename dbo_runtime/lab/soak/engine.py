"""Drive a vLLM engine in this process step by step, so that the same requests meet in the same steps each time."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any

from vllm import LLM, PoolingParams, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from dbo_runtime.errors import DeviceError
from dbo_runtime.lab.soak.answer import Answer, Completion, Counts, LogProbs
from dbo_runtime.lab.soak.images import draw_image, find_image_prompt
from dbo_runtime.lab.soak.request import Abilities, Request, Round
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

EXTENSION = "dbo_runtime.lab.soak.extension.SoakExtension"
OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 160,  # small, so that prefills come in chunks, in steps that also decode
    "max_num_seqs": 32,
    "enable_prefix_caching": True,
    "worker_extension_cls": EXTENSION,
    "disable_log_stats": False,  # the stats count preemptions
    "use_tqdm_on_load": False,
}
LONGEST_REQUESTS = 3  # longest requests that the KV cache holds, so that others are preempted
CPU_CACHE_BYTES = 1 << 28  # otherwise vLLM's CPU build needs most of the memory free
IDLE_STEPS = 10_000  # steps without an output after which none is expected; an answer has a few hundred tokens
WORDS = 40  # words to draw stop strings and bad words from
CALIBRATION_SECONDS = 4.0  # approximate: costs need not be good, but need two sizes, also on shared cores
TASKS = ("embed", "token_embed", "classify", "token_classify")  # tasks of poolers that need only a prompt
PREEMPTIONS, HITS = "vllm:num_preemptions", "vllm:prefix_cache_hits"


class Engine:
    """An `LLM` with a small KV cache, and small steps.

    Args:
        model: directory or name of the model.
        loras: directories of LoRA adapters.
        options: options for `LLM`, which replace those in `OPTIONS`.
    """

    def __init__(self, model: str, loras: tuple[str, ...], options: Mapping[str, Any]) -> None:
        on_cpu = {"kv_cache_memory_bytes": CPU_CACHE_BYTES} if get_platform().needs_cpu_patches else {}
        options = {**OPTIONS, **on_cpu, **options}
        if "num_gpu_blocks_override" not in options:
            options["num_gpu_blocks_override"] = _choose_blocks(model, options)
        self._llm = LLM(model, **options)
        if self._llm.llm_engine.vllm_config.parallel_config.data_parallel_size > 1:
            _keep_ranks_together(self._llm.llm_engine.engine_core.engine_core)
        self._loras = [LoRARequest(f"lora-{number}", number + 1, path) for number, path in enumerate(loras)]
        self.abilities = self._find_abilities()
        self._calibrates = self._compares_first_steps = False
        self._calibrated = 0

    def configure(self, settings: Mapping[str, str]) -> None:
        """Change settings of this package."""
        self._llm.collective_rpc("dbo_configure", args=(dict(settings),))

    def watch(self, calibrates: bool, first_steps: bool) -> None:
        """Switch on measuring costs in the pauses of rounds, and comparing each kind's first steps in each round."""
        self._calibrates, self._compares_first_steps = calibrates, first_steps

    def run(self, traffic: Round, turns: int) -> tuple[dict[int, Answer], Counts]:
        """Answer the requests of a round with an empty prefix cache; return the answers by number, and the counts.

        Data parallel ranks call this together, each with its own requests and the same *turns*. Requests may arrive in
        each of the first *turns* turns.
        """
        before = self._count()
        self._llm.reset_prefix_cache()
        if self._compares_first_steps:
            self._llm.collective_rpc("soak_compare_first_steps")
        running = _Running(self._llm.llm_engine, traffic, self.abilities, self._loras)
        for turn in count():
            if turn == traffic.pause:
                self._pause(running)
            running.change(turn)
            if self._llm.llm_engine.has_unfinished_requests():  # true if any rank has some; all ranks ask
                running.step()
            elif turn >= turns:
                break
        counts = self._count().since(before)
        if self._compares_first_steps:
            counts.alarms = self._collect("soak_list_alarms")
        counts.failures = self._collect("soak_list_failures")
        return running.collect(), counts

    def _pause(self, running: _Running) -> None:
        """Answer all running requests; then measure costs if requested. Data parallel ranks do this together."""
        while self._llm.llm_engine.has_unfinished_requests():
            running.step()
        if self._calibrates:
            self._llm.collective_rpc("dbo_calibrate", kwargs={"budget": CALIBRATION_SECONDS})
            self._calibrated += 1

    def close(self) -> None:
        """End the workers."""
        self._llm.llm_engine.engine_core.shutdown()

    def _collect(self, method: str) -> Counter[str]:
        """Count the texts that a method of the workers returns."""
        return Counter(text for of_rank in self._llm.collective_rpc(method) for text in of_rank)

    def _count(self) -> Counts:
        found = [rank for rank in self._llm.collective_rpc("dbo_statistics") if rank is not None]
        metrics: Counter[str] = Counter()
        for metric in self._llm.get_metrics():
            metrics[metric.name] += getattr(metric, "value", 0)
        counts = Counts(preempted=metrics[PREEMPTIONS], cached=metrics[HITS], calibrated=self._calibrated)
        for rank in found[:1]:
            counts.split, counts.micro_batches, counts.nano = rank["split"], rank["micro_batches"], rank["nano"]
            counts.declined = Counter(rank["declined"])
        return counts

    def _find_abilities(self) -> Abilities:
        vllm_config = self._llm.llm_engine.vllm_config
        config = vllm_config.model_config
        tokenizer = None if config.skip_tokenizer_init else self._llm.get_tokenizer()
        special: set[int] = set()
        words: list[str] = []
        vocabulary = config.get_vocab_size()
        if tokenizer is not None:
            vocabulary = min(vocabulary, len(tokenizer))
            special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", ()))
            texts = (tokenizer.decode([token]) for token in range(vocabulary) if token not in special)
            fitting = (text for text in texts if text.isascii() and text.isprintable() and text.strip() == text != "")
            words = [text for _, text in zip(range(WORDS), fitting, strict=False)]
        return Abilities(
            vocabulary,
            frozenset(special),
            config.max_model_len,
            tuple(words),
            find_image_prompt(config, tokenizer),
            len(self._loras),
            _list_lacking(bool(self._loras), vllm_config.speculative_config is not None),
            self._list_tasks(),
            bool(config.is_hybrid),
        )

    def _list_tasks(self) -> tuple[str, ...]:
        supported = self._llm.llm_engine.get_supported_tasks()
        return () if "generate" in supported else tuple(task for task in TASKS if task in supported)


class _Running:
    """The requests of one round, while they run."""

    def __init__(self, engine: Any, traffic: Round, abilities: Abilities, loras: list[LoRARequest]) -> None:
        self._engine = engine
        self._traffic = traffic
        self._abilities = abilities
        self._loras = loras
        self._last: dict[int, dict[int, Any]] = {number: {} for number in traffic.requests}  # output by completion
        self._pooled: dict[int, list[list[float]]] = {}
        self._refused: dict[int, str] = {}
        self._running: set[int] = set()
        self._aborted: set[int] = set()
        self._idle_steps = 0  # since the last output

    def change(self, turn: int) -> None:
        """Add the requests that arrive in a turn, and abort those that leave."""
        for number, request in self._traffic.requests.items():
            if request.arrives == turn:
                self._add(number, request)
            if request.leaves is not None and request.arrives + request.leaves == turn and number in self._running:
                self._engine.abort_request([str(number)])
                self._aborted.add(number)
                self._running.discard(number)

    def step(self) -> None:
        """Run one step of the engine.

        Raises:
            DeviceError: vLLM schedules none of the running requests any more.
        """
        outputs = self._engine.step()
        self._idle_steps = self._idle_steps + 1 if self._running and not outputs else 0
        if self._idle_steps > IDLE_STEPS:
            raise DeviceError(
                f"vLLM has answered none of requests {sorted(self._running)} in {IDLE_STEPS} steps. Run the round with "
                "fewer options of vLLM's, such as without drafts, to find the one it stops at."
            )
        for output in outputs:
            number = int(output.request_id)
            if isinstance(output, PoolingRequestOutput):
                data = output.outputs.data.float()
                self._pooled[number] = (data if data.dim() > 1 else data.reshape(1, -1)).tolist()
            else:
                self._last[number] |= {completion.index: (output, completion) for completion in output.outputs}
            if output.finished:
                self._running.discard(number)

    def collect(self) -> dict[int, Answer]:
        """Return the answers by number."""
        return {number: self._read(number) for number in self._traffic.requests}

    def _add(self, number: int, request: Request) -> None:
        try:
            lora = None if request.lora is None else self._loras[request.lora]
            self._engine.add_request(str(number), self._make_prompt(request), _make_params(request), lora_request=lora)
        except (ValueError, TypeError) as error:  # errors with which vLLM refuses requests
            self._refused[number] = f"{type(error).__name__}: {error}"
        else:
            self._running.add(number)

    def _make_prompt(self, request: Request) -> dict[str, Any]:
        if request.prompt.image is not None:
            image = draw_image(request.prompt.seed, *request.prompt.image)
            return {"prompt": self._abilities.image_prompt, "multi_modal_data": {"image": [image]}}
        return {"prompt_token_ids": request.prompt.draw_tokens(self._abilities, self._traffic.seed)}

    def _read(self, number: int) -> Answer:
        if number in self._refused:
            return Answer(refusal=self._refused[number])
        found = [self._last[number][index] for index in sorted(self._last[number])]
        prompts = [output.prompt_logprobs for output, _ in found if output.prompt_logprobs is not None]
        return Answer(
            [_read_completion(completion) for _, completion in found],
            [None if each is None else _read_log_probs(each) for each in prompts[-1]] if prompts else None,
            number in self._aborted,
            pooled=self._pooled.get(number),
        )


def _make_params(request: Request) -> SamplingParams | PoolingParams:
    if request.pooling is not None:
        return PoolingParams(**request.pooling)
    structure = None if request.structure is None else StructuredOutputsParams(**request.structure)
    kind = RequestOutputKind.FINAL_ONLY if request.leaves is None else RequestOutputKind.CUMULATIVE
    return SamplingParams(**request.sampling, structured_outputs=structure, output_kind=kind)


def _keep_ranks_together(core: Any) -> None:
    """Make each step of vLLM's engine run a forward, because other data parallel ranks wait for it.

    vLLM does so when serving, but not in an `LLM`. There, ranks wait for each other forever after a step that schedules
    nothing, because its requests wait for a grammar or for blocks.
    """
    step = core.step_fn

    def step_or_idle() -> Any:
        outputs, has_executed = step()
        if not has_executed:
            core.execute_dummy_batch()
        return outputs, has_executed

    core.step_fn = step_or_idle


def _list_lacking(has_loras: bool, has_drafts: bool) -> frozenset[str]:
    """Return the features that vLLM refuses together with drafts, and those that crash vLLM 0.30 on CPU.

    There it crashes on seeds with chunked prefills, and on prompt log-probabilities with LoRA.
    """
    lacking = {"logit_bias"} if has_drafts else set()
    if get_platform().needs_cpu_patches:
        lacking |= {"seed", "prompt_logprobs"} if has_loras else {"seed"}
    return frozenset(lacking)


def _read_completion(completion: Any) -> Completion:
    return Completion(
        list(completion.token_ids),
        [_read_log_probs(position) for position in completion.logprobs or ()],
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    )


def _read_log_probs(position: Mapping[int, Any]) -> LogProbs:
    return {token: entry.logprob for token, entry in position.items()}


def _choose_blocks(model: str, options: Mapping[str, Any]) -> int:
    """Return how many blocks hold the KV cache of a few of the longest requests, plus one that vLLM keeps empty."""
    known = inspect.signature(EngineArgs).parameters
    arguments = EngineArgs(model=model, **{name: value for name, value in options.items() if name in known})
    block: int = arguments.create_engine_config().cache_config.block_size
    each = -(-int(options["max_model_len"]) // block)
    return LONGEST_REQUESTS * each + 1
