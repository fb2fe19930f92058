"""The serve commands of vllm-ascend's tutorials: read as they are, and asked about as users would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_runtime.lab.doctor.serve_command import ServeCommand, check_serve_command
from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from tests.ascend.count_recipes import NO_ADAPTER, Answer, ask, count, list_commands, list_evidence, make_environment
from tests.support.ascend.proofs import list_all, list_proofs
from tests.support.ascend.recipe_models import MODELS, SCHEMES
from tests.support.ascend.recipes import Recipe, make_command, read_recipes

RECIPES = read_recipes(LATEST_ASCEND)
STABLE = read_recipes("0.23.0.post1")


@pytest.mark.parametrize(
    ("recipes", "commands", "overlapping", "producers"), [(RECIPES, 189, 129, 36), (STABLE, 146, 99, 27)]
)
def test_the_commands_are_those_of_the_tutorials(
    recipes: list[Recipe], commands: int, overlapping: int, producers: int
) -> None:
    assert len(recipes) == len(set(recipes)) == commands
    found = [recipe for recipe in recipes if recipe.overlaps]
    assert len(found) == overlapping
    assert sum(recipe.kv_role == "kv_producer" for recipe in found) == producers


def test_every_configuration_is_of_a_page_or_of_a_command() -> None:
    pages = {recipe.page.removesuffix(".md") for recipe in RECIPES + STABLE}
    commands = {f"{recipe.page.removesuffix('.md')}:{recipe.line}" for recipe in RECIPES + STABLE}
    assert MODELS.keys() <= pages | commands
    assert SCHEMES.keys() <= {recipe.model for recipe in RECIPES + STABLE} | commands


def test_a_command_has_what_its_line_says(tmp_path: Path) -> None:
    recipe = next(each for each in RECIPES if each.drafter == "eagle3" and each.config is not None)
    recipe = recipe._replace(tensor_parallel="", connectors="MooncakeConnectorV1", kv_role="kv_producer", flags="shdp")
    recipe = recipe._replace(decode_context_parallel="8", quantization="")
    (model, *options), variables = make_command(recipe, tmp_path)
    assert (Path(model) / "config.json").is_file()
    assert {"--tensor-parallel-size=8", "--decode-context-parallel-size=8"} <= set(options)
    assert not any(option.startswith(("--quantization", "--prefill-context")) for option in options)
    assert '--additional-config={"enable_shared_expert_dp": true}' in options
    assert any('"model": "' in option for option in options if option.startswith("--speculative-config="))
    assert any('"kv_connector": "MooncakeConnectorV1"' in option for option in options)
    assert variables.keys() == {"PYTHONPATH"}


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("DeepSeek-R1-W8A8", "W8A8_DYNAMIC"),
        ("Kimi-K2.5-w4a8", "W4A8_DYNAMIC"),
        ("dsk-v3.1-w4a4_mlp-w8a8c8_attn-0618-full", "W4A4_MXFP4"),
        ("Qwen3.5-397B-A17B-w4a4-mxfp4", "W4A4_MXFP4"),
        ("Qwen3-VL-30B-A3B-Instruct-w8a8-mxfp8", "W8A8_MXFP8"),
        ("", "W8A8_DYNAMIC"),
    ],
)
def test_a_models_name_says_how_it_is_quantized(model: str, scheme: str) -> None:
    assert RECIPES[0]._replace(model=model).scheme == scheme


def test_what_prevents_splitting_is_what_vllm_ascend_makes_of_a_command() -> None:
    (recipe,) = (
        each for each in RECIPES if (each.page, each.line) == ("pd_disaggregation_mooncake_multi_node.md", "547")
    )
    assert ask(recipe).reasons == ()
    balanced = recipe._replace(model="a-w4a4", flags="eplb16")
    assert ask(balanced).reasons == (
        "the MoE method cannot be decomposed "
        "(W4A4_DYNAMIC; known: W8A8, W8A8_DYNAMIC, W4A8_DYNAMIC, W8A8_MXFP8, W4A8_MXFP, W4A4_MXFP4)",
        "not supported yet: redundant experts, whose weights vllm-ascend does not load (num_redundant_experts)",
    )


@pytest.mark.slow
def test_the_doctor_says_what_may_go_wrong_with_a_command(tmp_path: Path) -> None:
    (recipe,) = (each for each in RECIPES if (each.page, each.line) == ("DeepSeek-V3.1.md", "179"))
    arguments, variables = make_command(recipe, tmp_path)
    environ = {**os.environ, **make_environment(), **variables}
    command = ServeCommand(
        {"HCCL_OP_EXPANSION_MODE": "AIV"}, (*arguments, "--enable-dbo", "--max-num-partial-prefills=1")
    )
    found = check_serve_command(command, {**environ, **command.variables})
    assert [finding.state for finding in found if "HCCL_OP_EXPANSION_MODE=AIV with MC2" in finding.found] == ["warn"]
    assert [finding.state for finding in found if "ignores --enable-dbo" in finding.found] == ["warn"]
    assert "does not know --max-num-partial-prefills" in found[0].found
    assert "would overlap" in found[1].found


@pytest.mark.slow
def test_the_doctor_says_that_images_are_served_with_host_lengths_on_one_npu(tmp_path: Path) -> None:
    several = next(each for each in RECIPES if "VL" in each.model and each.config is not None)
    recipe = several._replace(tensor_parallel="1", data_parallel="1", expert_parallel="0")
    arguments, variables = make_command(recipe, tmp_path)
    environ = {**os.environ, **make_environment(), **variables}
    layout, *_, note = check_serve_command(ServeCommand({}, tuple(arguments)), environ)
    assert "no communication to hide" in layout.found
    assert "takes its sequence lengths from the host" in note.found


@pytest.mark.slow
def test_what_is_not_proven_is_split_and_compared() -> None:
    (recipe,) = (each for each in RECIPES if (each.page, each.line) == ("DeepSeek-V3.1.md", "179"))
    answer = ask(recipe)
    assert answer.reasons == ()
    assert answer.verdict == "split, first steps compared: quantized weights W4A4_MXFP4"
    assert answer.proofs == ("test_first_steps.py",)


@pytest.mark.slow
def test_asked_in_a_fork_a_command_is_judged_as_in_a_new_process() -> None:
    """Forks are made by a process of their own, because this one has loaded vLLM's plugins."""
    recipes = [each for each in RECIPES if (each.page, each.line) in {("DeepSeek-V3.1.md", "179"), ("GLM5.md", "186")}]
    program = (
        "from tests.ascend.count_recipes import Recipe, ask_all\n"
        f"for answer in ask_all([{', '.join(map(repr, recipes))}]):\n"
        "    print('ANSWER', answer)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert found == [str(ask(recipe)) for recipe in recipes]
    assert len(found) == 2


@pytest.mark.slow
def test_fused_mc2_is_nothing_to_a_model_without_experts() -> None:
    (recipe,) = (each for each in RECIPES if (each.page, each.line) == ("InternVL3.5.md", "93"))
    assert recipe.flags == "fmc2"
    assert ask(recipe).reasons == ()


def test_commands_are_counted_by_reason() -> None:
    one, other = (
        each
        for each in RECIPES
        if each.page.startswith("pd_disaggregation") and each.kv_role == "kv_producer" and each.tensor_parallel != "1"
    )
    answers = [
        Answer(one, ("a (detail)", "b")),
        Answer(other, ("a (other)",)),
        Answer(one, ()),
        Answer(one, (NO_ADAPTER,)),
    ]
    assert count(answers)[0] == ["a", 2, 2, 1]
    assert ["nothing: would be split", 1, 1, 1] in count(answers)


def test_every_test_behind_a_command_exists() -> None:
    for proof in list_all():
        file, _, test = proof.partition("::")
        assert f"def {test or 'test_'}" in (Path(__file__).parent / file).read_text(), proof


def test_a_command_that_would_be_split_has_the_tests_of_all_that_it_serves_with() -> None:
    recipe = next(each for each in RECIPES if each.page == "DeepSeek-V3.2.md" and each.data_parallel == "2")
    sizes = {"tensor": 8, "pipeline": 1, "data": 2, "expert": 16}
    proofs = list(list_proofs(recipe._replace(flags="fc1", connectors=""), "DeepseekV32ForCausalLM", sizes))
    assert proofs[0] == "test_sparse_attention.py"
    assert {"test_flashcomm.py", "test_sparse_attention.py::test_quantized_weights"} < set(proofs)
    assert any("data_parallel" in proof for proof in proofs)
    assert any("drafts" in proof for proof in proofs)


def test_a_line_says_how_a_command_serves_and_what_becomes_of_it() -> None:
    recipe = next(each for each in RECIPES if (each.page, each.line) == ("DeepSeek-R1.md", "130"))
    answers = [Answer(recipe, (), ("all-reduces",), ("a.py",)), Answer(recipe, ("why (detail)",))]
    split, unsplit = list_commands(answers)
    assert split == ["DeepSeek-R1:130", "TP4 DP4 EP", "W8A8_DYNAMIC mtp", "split"]
    assert unsplit[-1] == "unsplit: why"
    assert list_evidence(answers) == [["DeepSeek-R1:130", "all-reduces", "`a.py`"]]
    compared = Answer(recipe, compared=("drafter dspark",), in_nano_batches=True, reasons=())
    assert compared.verdict == "split into nano-batches, first steps compared: drafter dspark"
