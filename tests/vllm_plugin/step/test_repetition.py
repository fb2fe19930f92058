"""What a split step is compared with: the unsplit step, and its pieces where rounding may choose other experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import DPMetadata, override_forward_context
from vllm.sequence import IntermediateTensors

from dbo_runtime.batch import BatchSlice
from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.api.features import mistakes_one_token
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step import comparison
from dbo_runtime.vllm_plugin.step import forward as forward_module
from dbo_runtime.vllm_plugin.step.arguments import StepArguments, join_results
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.forwards import (
    EXPECTED,
    IDS,
    POSITIONS,
    Lines,
    Model,
    Splitter,
    make_context,
    make_forward,
    run,
)

TOKENS = 8
PIECE = BatchSlice(0, 1, 2, 5)


class ReroutingModel(Model):
    """Gives something else where all tokens run at once, as if rounding led some of them to other experts."""

    def __init__(self, slip_of_pieces: float = 0.0) -> None:
        super().__init__()
        self.slip_of_pieces = slip_of_pieces

    def forward(self, ids: Any, positions: Any, intermediate: Any = None, embeds: Any = None, **kwargs: Any) -> Any:
        x = super().forward(ids, positions, intermediate, embeds, **kwargs)
        return x * 3.0 if positions.shape[-1] == TOKENS else x + self.slip_of_pieces

    @property
    def sizes(self) -> list[int]:
        """The tokens of each run of the model's own forward."""
        return [positions.shape[-1] for _, positions, *_ in self.unsplit]


class CpuSplitter(Splitter):
    """Whose contexts have nothing of vllm-ascend's."""

    platform = get_platform("cpu")


class Keeping:
    """An adapter whose model keeps data for its next forward."""

    def take_inputs(self, model: Any, x: torch.Tensor, keep: bool) -> torch.Tensor:
        return x


class Giving(Keeping):
    """And can be given them back."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        self._given = given

    def give_inputs(self, model: Any, x: torch.Tensor) -> None:
        self._given.append(x)


def make_compared(model: Model, is_first: bool, splitter: Splitter | None = None, **options: Any) -> SplitForward:
    """Return a forward whose steps are compared: as first steps, or under DBO_CHECK."""
    forward = make_forward(model, splitter or CpuSplitter(), check=not is_first, **options)
    if is_first:
        forward.decider.first_steps = FirstSteps(Lines())  # type: ignore[arg-type] - which keeps the lines
    return forward


@pytest.mark.parametrize("is_first", [False, True], ids=["checked", "first steps"])
def test_a_step_that_equals_its_pieces_is_right_where_rounding_may_choose(is_first: bool) -> None:
    model, splitter = ReroutingModel(), CpuSplitter()
    forward = make_compared(model, is_first, splitter, may_diverge=True)
    results = run(forward)
    assert torch.equal(results, EXPECTED * 3.0 if is_first else EXPECTED)
    assert model.sizes == [TOKENS, 4, 4, TOKENS], "the last run is the unsplit one, whose keys and states stay"
    assert splitter.remade == [0, 1]
    run(forward)
    assert forward.runtime.statistics.split == 2


def test_a_step_that_differs_from_its_pieces_is_an_alarm() -> None:
    with pytest.raises(SplitError, match="split and one after the other hidden states differ"):
        run(make_compared(ReroutingModel(slip_of_pieces=1.0), is_first=False, may_diverge=True))
    forward = make_compared(ReroutingModel(slip_of_pieces=1.0), is_first=True, may_diverge=True)
    run(forward)
    assert forward.decider.first_steps is not None
    assert forward.decider.first_steps.failure is not None


def test_where_rounding_leads_nowhere_else_the_unsplit_step_alone_is_right() -> None:
    model = ReroutingModel()
    with pytest.raises(SplitError, match="split and unsplit hidden states differ"):
        run(make_compared(model, is_first=False))
    assert model.sizes == [TOKENS]


def test_a_model_that_keeps_what_cannot_be_given_back_runs_no_pieces() -> None:
    model = ReroutingModel()
    with pytest.raises(SplitError, match="split and unsplit hidden states differ"):
        run(make_compared(model, is_first=False, may_diverge=True, adapter=Keeping()))
    assert model.sizes == [TOKENS]


def test_what_a_model_keeps_is_given_back_to_each_run_for_its_tokens() -> None:
    model, given = ReroutingModel(), list[torch.Tensor]()
    forward = make_compared(
        model,
        is_first=False,
        may_diverge=True,
        adapter=Giving(given),
    )
    run(forward)
    x = model.embed_input_ids(torch.arange(TOKENS))
    assert all(map(torch.equal, given, [x, x[:4], x[4:], x]))
    assert len(given) == len(model.sizes)


def test_each_run_begins_with_the_states_that_the_step_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that moves a state on in each forward, as linear attention does."""
    state = torch.zeros(1)

    class States:
        def __init__(self, context: object, received: object) -> None:
            self.held = state.clone()

        def restore(self) -> None:
            state.copy_(self.held)

    class Moving(Model):
        def compute(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            state.add_(x.shape[0])
            return super().compute(x, positions)

        def forward(self, ids: Any, positions: Any, *others: Any, **kwargs: Any) -> Any:
            state.add_(positions.shape[-1])
            return super().forward(ids, positions, *others, **kwargs) + (state.item() - TOKENS)

    monkeypatch.setattr(forward_module, "SavedStates", States)
    assert torch.equal(run(make_compared(Moving(), is_first=False)), EXPECTED)
    assert state.item() == TOKENS


@pytest.mark.parametrize("is_first", [False, True], ids=["checked", "first steps"])
def test_contexts_that_do_not_fit_are_found_before_any_op_runs(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "find_problem", lambda *_: "slots are 1, where the step has 2")
    model = Model()
    forward = make_compared(model, is_first)
    if not is_first:
        with pytest.raises(SplitError, match="slots are 1"):
            run(forward)
    for _ in range(2 * is_first):
        assert torch.equal(run(forward), EXPECTED)
    assert model.seen == []
    assert forward.runtime.statistics.split == 0


def test_a_problem_on_another_rank_stops_this_one_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    forward = make_compared(model, is_first=False)
    monkeypatch.setattr(forward._comparison._agreement, "gather", lambda own: [own, "the second rank has other slots"])
    with pytest.raises(SplitError, match="the second rank has other slots"):
        run(forward)
    assert model.seen == []


def test_arguments_are_cut_by_token() -> None:
    whole = StepArguments(
        torch.arange(8),
        torch.arange(24).reshape(3, 8),
        IntermediateTensors({"residual": torch.arange(8.0)}),
        torch.arange(16.0).reshape(8, 2),
        {"further": 1},
    )
    ids, positions, given, embeds, further = whole.cut(PIECE)
    assert ids is not None
    assert given is not None
    assert embeds is not None
    assert (ids.tolist(), positions.tolist()) == ([2, 3, 4], [[2, 3, 4], [10, 11, 12], [18, 19, 20]])
    assert (given["residual"].tolist(), embeds.tolist()) == ([2.0, 3.0, 4.0], [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]])
    assert further == {"further": 1}
    assert StepArguments(None, positions, None, None, {}).cut(BatchSlice(0, 1, 0, 2))[0] is None


def test_arguments_are_padded_with_the_last_token() -> None:
    whole = StepArguments(
        torch.tensor([4, 7]),
        torch.tensor([[0, 1], [2, 3], [4, 5]]),
        IntermediateTensors({"residual": torch.tensor([1.0, 2.0])}),
        torch.tensor([[1.0], [2.0]]),
        {},
    )
    assert whole.pad(2) is whole
    ids, positions, given, embeds, _ = whole.pad(4)
    assert ids is not None
    assert given is not None
    assert embeds is not None
    assert ids.tolist() == [4, 7, 7, 7]
    assert positions.tolist() == [[0, 1, 1, 1], [2, 3, 3, 3], [4, 5, 5, 5]]
    assert (given["residual"].tolist(), embeds.tolist()) == ([1.0, 2.0, 2.0, 2.0], [[1.0], [2.0], [2.0], [2.0]])


def test_what_a_forward_may_overwrite_is_copied() -> None:
    embeds, residual = torch.ones(2, 2), torch.ones(2, 2)
    whole = StepArguments(None, torch.arange(2), IntermediateTensors({"residual": residual}), embeds, {})
    copy = whole.copy()
    assert copy.inputs_embeds is not None
    assert copy.intermediate_tensors is not None
    copy.inputs_embeds.zero_()
    copy.intermediate_tensors["residual"].zero_()
    assert embeds.sum() + residual.sum() == 8


def test_results_of_pieces_are_joined_in_each_form_that_forwards_return() -> None:
    first, second = torch.zeros(2, 3), torch.ones(1, 3)
    joined = torch.cat([first, second])
    assert torch.equal(join_results([first, second]), joined)  # type: ignore[arg-type] - as the pieces are
    hidden, auxiliary = join_results([(first, [first + 1]), (second, [second + 1])])
    assert torch.equal(hidden, joined)
    assert torch.equal(auxiliary[0], joined + 1)
    handed = join_results([IntermediateTensors({"residual": part}) for part in (first, second)])
    assert isinstance(handed, IntermediateTensors)
    assert torch.equal(handed["residual"], joined)


@pytest.mark.parametrize("is_first", [False, True], ids=["checked", "first steps"])
@pytest.mark.parametrize(("other", "is_split"), [(1, False), (2, True)])
def test_what_the_model_itself_mistakes_is_not_compared_and_not_split(
    is_first: bool, other: int, is_split: bool
) -> None:
    model = Model()
    forward = make_compared(model, is_first, mistakes_one_token=True)
    context = make_context()
    context.dp_metadata = DPMetadata(torch.tensor([TOKENS, other]))
    with override_forward_context(context):
        assert torch.equal(forward(input_ids=IDS, positions=POSITIONS), EXPECTED)
    counts = forward.runtime.statistics
    assert counts.split == is_split
    assert (comparison.INCOMPARABLE.reason in counts.declined) != is_split
    assert len(model.unsplit) == 1


class Telling(torch.nn.Module):
    """A layer that finds out by itself how its rows are laid out."""

    def forward(self, x: torch.Tensor, full: int) -> torch.Tensor:
        input_is_sequence_parallel = x.shape[0] != full
        return x if input_is_sequence_parallel else -x


class Told(torch.nn.Module):
    """A layer that is told."""

    def forward(self, x: torch.Tensor, input_is_sequence_parallel: bool) -> torch.Tensor:
        return x if input_is_sequence_parallel else -x


@pytest.mark.parametrize(
    ("layer", "spreads", "expected"), [(Telling, True, True), (Telling, False, False), (Told, True, False)]
)
def test_layers_that_guess_their_layout_mistake_one_token(layer: type, spreads: bool, expected: bool) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(use_sequence_parallel_moe=spreads))
    assert mistakes_one_token(config, torch.nn.Sequential(torch.nn.Linear(1, 1), layer())) is expected
