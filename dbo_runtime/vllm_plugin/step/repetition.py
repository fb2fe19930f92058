"""Run a split step again, by vLLM's own forward: unsplit, or one micro-batch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from vllm import forward_context
from vllm.forward_context import ForwardContext

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.api.kv_agent import replace_agent
from dbo_runtime.vllm_plugin.context.saved_states import SavedStates
from dbo_runtime.vllm_plugin.parallel.stage import Results
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.step.arguments import StepArguments, join_results

SelectLora = AbstractContextManager[Callable[[int], None] | None]


@dataclass(slots=True)
class Repetition:
    """A step that runs again by the model's own forward.

    Each run begins with the states that the step began with. No run is reported to a KV connector, or counted. The last
    run has to be an unsplit one, so that caches hold what vLLM would have left there.

    Attributes:
        forward: model's own forward.
        arguments: arguments of the step.
        states: states of the step's requests, before it ran for the first time.
        platform: platform that vLLM serves on.
        give_back: gives the model back the data that it keeps for each token for its next forward, for a slice of the
            tokens or for all; None if it keeps no data.
    """

    forward: Callable[..., Results]
    arguments: StepArguments
    states: SavedStates
    platform: Platform
    give_back: Callable[[slice], None] | None = None

    def run_unsplit(self) -> Results:
        """Run all tokens at once."""
        with self._again():
            self._give_back(slice(None))
            return self._run(self.arguments)

    def run_pieces(
        self,
        slices: Sequence[BatchSlice],
        make_context: Callable[[int], ForwardContext],
        select_lora: SelectLora | None = None,
    ) -> Results:
        """Run one micro-batch after another, in steps of their own, as vLLM runs chunks of prompts.

        *make_context* makes the forward context of a micro-batch, by its number, right before it runs. So no
        micro-batch can have the context of another. Collective, as every forward is.
        """
        results, arguments = [], self.arguments.pad(slices[-1].last_token)
        with self._again(), select_lora or nullcontext() as select:
            for number, piece in enumerate(slices):
                if select is not None:
                    select(number)
                self._give_back(piece.tokens)
                with forward_context.override_forward_context(make_context(number)):
                    results.append(self._run(arguments.cut(piece)))
        return join_results(results)

    def _run(self, arguments: StepArguments) -> Results:
        """Run the model's own forward, and return its results for all tokens."""
        results = arguments.copy().run(self.forward)
        flashcomm = self.platform.find_flashcomm(forward_context.get_forward_context())
        return results if flashcomm is None else flashcomm.join_chunks(results)

    @contextmanager
    def _again(self) -> Iterator[None]:
        self.states.restore()
        with replace_agent(None), self.platform.repeating_step():
            yield

    def _give_back(self, tokens: slice) -> None:
        if self.give_back is not None:
            self.give_back(tokens)
