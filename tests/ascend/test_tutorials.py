"""What the reader of vllm-ascend's tutorials makes of pages."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.support.ascend.recipes import Recipe
from tests.support.ascend.tutorials import list_serve_commands, main, read_tutorials, tell_facts

IN_A_TAB = """\
=== "A3 series"

    === "Node 0"

        ```shell
        export VLLM_USE_V2_MODEL_RUNNER=0
        exec vllm serve /weights/GLM-5-w8a8-mxfp8/ \\
            -tp 8 --data_parallel_size=2 --pipeline-parallel-size 1 \\
            # the experts are everywhere

            --enable-expert-parallel --quantization ascend \\
            --attention_config.indexer_kv_dtype int8 \\
            --speculative-config '{"num_speculative_tokens": 3, "method": "mtp"}' \\
            --additional-config '{
                "enable_flashcomm1": true,
                "enable_dsa_cp": "False",
                "eplb_config": {"dynamic_eplb": true, "num_redundant_experts": 16}
            }' \\
        ```
"""

PARTS = """\
```{code-block} bash
   :substitutions:
export VLLM_ASCEND_ENABLE_FLASHCOMM1=1 VLLM_ASCEND_ENABLE_FUSED_MC2=1
python3 -m vllm.entrypoints.openai.api_server --model=a/b \\
  --kv-transfer-config '{
    "kv_connector": "MultiConnector", "kv_role": "kv_producer", "engine_id": "dp-'"$4"'",
    "kv_connector_extra_config": {"connectors": [
      {"kv_connector": "MooncakeConnectorV1", "kv_port": '"$2"'},
      {"kv_connector": "AscendStoreConnector", "lookup_rpc_port": '$((37000 + $4))'}
    ]}
  }' --additional-config '{"enable_fused_mc2": 0}'
curl http://localhost
```
"""


def read(text: str) -> list[Recipe]:
    return [tell_facts(command) for command in list_serve_commands("page.md", text)]


def shell(*lines: str) -> str:
    return "\n".join(["```bash", *lines, "```", ""])


def test_a_command_in_a_tab_goes_over_comments_and_blank_lines() -> None:
    (recipe,) = read(IN_A_TAB)
    assert recipe == Recipe(
        page="page.md",
        line="5",  # of the fence
        model="GLM-5-w8a8-mxfp8",
        tensor_parallel="8",
        data_parallel="2",
        pipeline_parallel="1",
        expert_parallel="1",
        quantization="ascend",
        drafter="mtp",
        connectors="",
        kv_role="",
        flags="fc1 eplb16 li_c8",
        decode_context_parallel="",
        prefill_context_parallel="",
        second_runner="0",
        prefix_caching="",
        cudagraph_mode="",
    )


def test_a_connector_has_parts_and_an_option_counts_before_a_variable() -> None:
    (recipe,) = read(PARTS)
    assert recipe.connectors == "AscendStoreConnector,MooncakeConnectorV1,MultiConnector"
    assert recipe.kv_role == "kv_producer"
    assert (recipe.model, recipe.flags) == ("b", "fc1")


def test_a_variable_is_known_where_its_block_assigns_it() -> None:
    sizes = "-tp $TP --data-parallel-size ${DP} -pp ${PP:-2} -dcp $7"
    known, unknown = read(
        shell("MODEL=org/a-w4a8  # the weights", "export TP=4", 'DP="2"', f"vllm serve $MODEL {sizes}")
        + shell(f'vllm serve "$MODEL" {sizes}')
    )
    assert known[2:6] == ("a-w4a8", "4", "2", "2")
    assert unknown[2:6] == ("", "", "", "2")
    assert known.decode_context_parallel == ""


@pytest.mark.parametrize("path", ["your_model_path", "<MODEL_PATH>", "$1", "xxxx"])
def test_a_placeholder_is_no_model(path: str) -> None:
    (recipe,) = read(shell(f"vllm serve '{path}'"))
    assert recipe.model == ""


def test_commands_of_other_blocks_and_texts_are_none() -> None:
    assert read("`vllm serve a`\n\n```text\nvllm serve a\n```\n" + shell("# vllm serve a", "pgrep 'vllm serve'")) == []


def test_a_block_that_is_not_closed_ends_with_the_next() -> None:
    first, second = read("```shell\nvllm serve a \\\n\n" + shell("vllm serve b"))
    assert (first.line, first.model, second.line, second.model) == ("1", "a", "4", "b")


def test_what_is_no_json_has_its_place_told() -> None:
    with pytest.raises(ValueError, match=r"page\.md.*--additional-config is not JSON"):
        read(shell("vllm serve a --additional-config '{enable_dsa_cp: true}'"))


def test_commands_that_differ_in_variables_only_are_one_row(tmp_path: Path) -> None:
    pages = tmp_path / "models"
    pages.mkdir()
    command = "vllm serve a/c --port {} --tensor-parallel-size {}"
    texts = [shell(command.format(port, size)) for port, size in (("$1", "$2"), ("$3", "$4"), ("$1", "8"))]
    (pages / "page.md").write_text("\n".join(texts), encoding="utf-8")
    recipes = read_tutorials(tmp_path)
    assert [(recipe.line, recipe.tensor_parallel) for recipe in recipes] == [("1", ""), ("9", "8")]
    main(str(tmp_path), str(tmp_path / "facts.csv"))
    with (tmp_path / "facts.csv").open(encoding="utf-8", newline="") as file:
        assert [Recipe(**row) for row in csv.DictReader(file)] == recipes
