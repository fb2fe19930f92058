from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dbo_models.toy import ToyAdapter, ToyCollectives, ToyModel
from dbo_runtime.adapters.communication import Collectives
from dbo_runtime.adapters.contract import EncoderAdapter, StageAdapter, name_adapter, record_program
from dbo_runtime.adapters.registry import check_adapter, get_adapter, get_encoder_adapter
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value


class NoRecord:
    def decline(self, model: Any) -> Decline | None:
        return None


class NoDecline:
    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        return x


class RecordNotCallable(NoRecord):
    record = None


class RecordLacksPositions(NoRecord):
    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value) -> Value:
        return x


class DeclineTakesMore(NoDecline):
    def decline(self, model: Any, config: Any) -> Decline | None:
        return None


class NeedsArguments(NoDecline):
    def __init__(self, layers: int) -> None:
        self.layers = layers

    def decline(self, model: Any) -> Decline | None:
        return None


class ReturnsPair(NoRecord):
    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Any:
        return p.compute("norm", lambda x: x, x), x


def test_a_good_class_gives_an_adapter() -> None:
    adapter = check_adapter(ToyAdapter, "dbo_models.toy:ToyAdapter")
    assert isinstance(adapter, ToyAdapter)
    assert name_adapter(adapter) == "dbo_models.toy.ToyAdapter"


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (NoRecord, r"adapter somewhere:X has no method record\(\)"),
        (NoDecline, r"adapter somewhere:X has no method decline\(\)"),
        (RecordNotCallable, r"adapter somewhere:X has no method record\(\)"),
        (
            RecordLacksPositions,
            r"record\(self, p, model, collectives, x\) must take \(self, p, model, collectives, x, positions\)",
        ),
        (DeclineTakesMore, r"decline\(self, model, config\) must take \(self, model\)"),
        (NeedsArguments, r"adapter somewhere:X cannot be made by NeedsArguments\(\): .*'layers'"),
    ],
)
def test_a_bad_class_is_refused_with_what_is_wrong_and_where(cls: type, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as raised:
        check_adapter(cls, "somewhere:X")
    assert f"({__file__}:" in str(raised.value)


def test_adapters_take_stages_of_a_pipeline_if_they_say_so() -> None:
    assert isinstance(get_adapter("LlamaForCausalLM"), StageAdapter)
    assert not isinstance(ToyAdapter(), StageAdapter)


def test_a_class_without_source_is_refused_too() -> None:
    with pytest.raises(ProgramError, match=r"adapter builtins:dict has no method decline\(\).*no source"):
        check_adapter(dict, "builtins:dict")


def test_an_instance_is_refused() -> None:
    with pytest.raises(ProgramError, match="adapter somewhere:X must be a class, not <"):
        check_adapter(ToyAdapter(), "somewhere:X")


def test_the_recorded_program_takes_hidden_states_and_positions() -> None:
    program = record_program(ToyAdapter(), ToyModel(layers=1), ToyCollectives(ranks=2))
    assert [value.name for value in program.inputs] == ["x", "positions"]
    # x = 1: residual 2, normed 7; attention on (7 + 5) + 7 = 19, reduced 38; residual 40, normed 121; mlp 603, 1206
    assert run_sequential([program], [(1, 5)]) == [(1206 + 40,)]


def test_the_toy_declines_a_model_without_layers() -> None:
    assert ToyAdapter().decline(ToyModel(layers=0)) == Decline("the model has no layers")
    assert ToyAdapter().decline(ToyModel(layers=1)) is None


def test_a_recorded_result_that_is_not_one_value_is_refused() -> None:
    with pytest.raises(ProgramError, match=rf"record\(\) of {__name__}.ReturnsPair must return one Value"):
        record_program(ReturnsPair(), None, ToyCollectives())


class NoExperts(ToyCollectives):
    """Finds out while a program is recorded that the experts cannot be decomposed."""

    def decompose(self, experts: Any, get_logits: Any = None, takes_chunks: bool = False) -> None:
        raise DeclineError("the experts are not known", type(experts).__name__)


class Decomposing(NoRecord):
    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        collectives.decompose(model)
        return x


def test_a_model_that_is_declined_while_it_is_recorded_gives_the_decline() -> None:
    program = record_program(Decomposing(), 1.5, NoExperts())
    assert program == Decline("the experts are not known", "float")


class OtherNames(NoRecord):
    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, places: Value) -> Value:
        return x


def test_an_input_of_a_name_that_no_adapter_has_is_refused() -> None:
    with pytest.raises(ProgramError, match=r".*OtherNames takes the input 'places'; adapters can take x, positions"):
        record_program(OtherNames(), None, ToyCollectives())


class Misplacing(NoRecord):
    """Declares one op where it does not belong."""

    def __init__(self, lane: str = "compute", layers: tuple[int | None, ...] = (0, 1)) -> None:
        self.lane, self.layers = lane, layers

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        for number, layer in enumerate(self.layers):
            with nullcontext() if layer is None else p.layer(layer):
                x = p.op(f"op{number}", lambda x: x, x, lane=self.lane)
        return x


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Misplacing("aux"), r"op 'L0.op0' is on lane 'aux'; a model's lanes are compute, comm, side\."),
        (Misplacing(layers=(0, None, 1)), r"op 'op1' is in no layer, but lies between layers; declare it inside"),
        (Misplacing("comm", layers=(None,)), r"op 'op0' communicates, but no op of the program is in a layer"),
    ],
)
def test_an_op_in_the_wrong_place_is_refused_by_file_and_line(adapter: Misplacing, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as raised:
        record_program(adapter, None, ToyCollectives())
    assert f"({__file__}:" in str(raised.value)


@pytest.mark.parametrize(("has_side", "lane"), [(True, "side"), (False, "compute")])
def test_ops_are_on_the_side_lane_only_where_it_may_be_used(has_side: bool, lane: str) -> None:
    program = record_program(Misplacing("side"), None, ToyCollectives(), has_side)
    assert {op.lane for op in program.ops} == {lane}


def test_ops_before_and_after_all_layers_are_in_none() -> None:
    program = record_program(Misplacing(layers=(None, 0, 1, None)), None, ToyCollectives())
    assert [op.label for op in program.ops] == ["op0", "L0.op1", "L1.op2", "op3"]


class WrongInputs(ToyAdapter):
    def take_inputs(self, model: Any, x: Any) -> Any:
        return x


def test_what_an_adapter_offers_in_addition_to_the_contract_is_checked_too() -> None:
    with pytest.raises(ProgramError, match=r"take_inputs\(self, model, x\) must take \(self, model, x, keep\)"):
        check_adapter(WrongInputs, "acme:WrongInputs")


class WrongArguments(ToyAdapter):
    def take_arguments(self, model: Any, given: Any) -> Any:
        return given


def test_how_an_adapter_takes_further_arguments_is_checked_too() -> None:
    with pytest.raises(ProgramError, match=r"take_arguments\(self, model, given\) must take .*, given, tokens\)"):
        check_adapter(WrongArguments, "acme:WrongArguments")


def test_encoders_have_adapters_of_their_own() -> None:
    assert get_encoder_adapter("Qwen3_VisionTransformer") is not None
    assert get_encoder_adapter("UnknownTransformer") is None
    with pytest.raises(ProgramError, match=r"adapter acme:Toy: decline\(self, model\) must take \(self, encoder\)"):
        check_adapter(ToyAdapter, "acme:Toy", EncoderAdapter)


def test_there_is_no_adapter_for_an_unknown_architecture() -> None:
    assert get_adapter("UnknownForCausalLM") is None


ADAPTER = """
class {name}:
    def decline(self, model): return None
    def record(self, p, model, collectives, x, positions): return x
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a distribution with an entry point."""

    def install(distribution: str, entry: str, code: str = "") -> None:
        site = tmp_path / distribution
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{distribution}_adapters.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dbo_runtime.adapters]\n{entry}\n")
        monkeypatch.syspath_prepend(site)

    return install


def test_an_installed_adapter_is_found_by_architecture(install: Any) -> None:
    install("acme_one", "AcmeForCausalLM = acme_one_adapters:Acme", ADAPTER.format(name="Acme"))
    adapter = get_adapter("AcmeForCausalLM")
    assert adapter is not None
    assert name_adapter(adapter) == "acme_one_adapters.Acme"
    assert get_adapter("AcmeForSequenceClassification") is None


def test_an_adapter_that_cannot_be_imported_is_refused(install: Any) -> None:
    install("acme_two", "AcmeForCausalLM = acme_two_adapters:Missing", ADAPTER.format(name="Acme"))
    message = "adapter acme_two_adapters:Missing of AcmeForCausalLM cannot be imported: AttributeError"
    with pytest.raises(ProgramError, match=message):
        get_adapter("AcmeForCausalLM")


def test_an_adapter_that_breaks_the_contract_is_refused_when_it_is_found(install: Any) -> None:
    install("acme_three", "AcmeForCausalLM = acme_three_adapters:Acme", "class Acme:\n    pass\n")
    with pytest.raises(ProgramError, match=r"adapter acme_three_adapters:Acme has no method decline\(\)"):
        get_adapter("AcmeForCausalLM")


def test_two_adapters_of_one_architecture_are_refused(install: Any) -> None:
    install("acme_four", "AcmeForCausalLM = acme_four_adapters:Acme", ADAPTER.format(name="Acme"))
    install("acme_five", "AcmeForCausalLM = acme_five_adapters:Acme", ADAPTER.format(name="Acme"))
    message = r"AcmeForCausalLM has several adapters \(acme_five_adapters:Acme, acme_four_adapters:Acme\)"
    with pytest.raises(ProgramError, match=message):
        get_adapter("AcmeForCausalLM")


def test_the_same_adapter_registered_twice_is_one(install: Any) -> None:
    """Two copies of one distribution on the path, as an editable install leaves them."""
    install("acme_six", "AcmeForCausalLM = acme_six_adapters:Acme", ADAPTER.format(name="Acme"))
    install("acme_seven", "AcmeForCausalLM = acme_six_adapters:Acme")
    assert get_adapter("AcmeForCausalLM") is not None
