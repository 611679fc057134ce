"""Reading recipes: inheritance, overrides, types, suggestions, provenance."""

import ast
import dataclasses
import os
import runpy
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from cpu_seconds import takes_less

from slimrl.config import package_fields
from slimrl.config.check import check_recipe
from slimrl.config.hints import meant_key
from slimrl.config.interpolation import escaped, is_reference
from slimrl.config.keys import KEY_TYPES, NAME
from slimrl.config.load import LoadedRecipe, intended_command, load_recipe, read_recipe
from slimrl.config.package_fields import megatron_fields, package_folder, sglang_fields
from slimrl.config.problems import RecipeError
from slimrl.config.schema.algorithm import Aggregation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import VerifyMode
from slimrl.config.show import dump_resolved, show

MINIMAL = """\
steps: 3
run:
  name: demo
model:
  path: models/toy
trainer:
  max_tokens_per_rank: 512
  optimizer:
    lr: 1e-6
algorithm:
  max_logprob_mismatch: 1e-4
rollout:
  max_trajectory_tokens: 256
reward:
  function: tasks.demo:reward
data:
  train: data/train.jsonl
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return Path(path)


def load(text: str, *overrides: str) -> LoadedRecipe:
    return load_recipe(write("recipe.yaml", text), overrides)


def refused(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return str(caught.value).splitlines()


def test_a_minimal_recipe_has_the_defaults_of_the_schema_elsewhere(folder):
    recipe = load(MINIMAL).recipe
    assert isinstance(recipe, Recipe)
    assert recipe.trainer.optimizer.lr == 1e-6
    assert recipe.rollout.eval_sampling.temperature == 0.0
    assert recipe.resync.verify is VerifyMode.sampled
    assert recipe.trainer.optimizer.beta2 == Recipe().trainer.optimizer.beta2


def test_a_section_that_is_given_in_part_has_its_own_defaults_elsewhere():
    """pydantic makes such a section from the defaults of its class, whatever the recipe's default is."""
    defaults = Recipe()
    sections = [key for key, kind in KEY_TYPES.items() if dataclasses.is_dataclass(kind) and NAME not in key]
    for key in sections:
        assert attrgetter(key)(defaults) == KEY_TYPES[key](), key
    assert len(sections) > 20


def test_every_value_says_which_line_it_came_from(folder):
    loaded = load(MINIMAL, "seed=7")
    assert loaded.provenance["trainer.optimizer.lr"] == "recipe.yaml:9"
    assert loaded.provenance["seed"] == "command line"
    assert loaded.provenance["rollout.num_engines"] == "default"
    assert {key for key, _, _ in show(loaded)} == set(loaded.provenance)


def test_a_recipe_replaces_values_of_the_files_that_it_extends_in_order(folder):
    write("base/one.yaml", "seed: 1\nsteps: 10\nrollout:\n  sglang:\n    mem_fraction_static: 0.5\n")
    write("base/two.yaml", "extends: one.yaml\nsteps: 20\nrollout:\n  num_engines: 2\n")
    text = MINIMAL.replace("steps: 3\n", "extends: [base/two.yaml]\n").replace(
        "rollout:\n", "rollout:\n  sglang:\n    page_size: 1\n"
    )
    loaded = load(text)
    assert (loaded.recipe.seed, loaded.recipe.steps, loaded.recipe.rollout.num_engines) == (1, 20, 2)
    assert loaded.recipe.rollout.sglang == {"mem_fraction_static": 0.5, "page_size": 1}
    assert loaded.provenance["steps"] == "base/two.yaml:2"
    assert loaded.provenance["rollout.sglang.mem_fraction_static"] == "base/one.yaml:5"


def test_of_several_extended_files_the_later_wins_and_paths_are_relative_to_the_one_that_says_them(folder):
    write("base/deep/shared.yaml", "seed: 1\nagent:\n  tools: [a:f, b:g]\n")
    write("base/one.yaml", "extends: deep/shared.yaml\nsteps: 10\nrollout:\n  num_engines: 2\n")
    write("base/two.yaml", "steps: 20\nagent:\n  tools: [c:h]\n")
    write("recipes/mine.yaml", MINIMAL.replace("steps: 3\n", "extends: [../base/one.yaml, ../base/two.yaml]\n"))
    recipe = load_recipe("recipes/mine.yaml").recipe
    assert (recipe.seed, recipe.steps, recipe.rollout.num_engines) == (1, 20, 2)
    assert recipe.agent.tools == ["c:h"]


def test_two_files_that_extend_each_other_are_one_problem_with_the_whole_circle(folder):
    write("one.yaml", "extends: other/two.yaml\n")
    write("other/two.yaml", "seed: 1\nextends:\n  - ../one.yaml\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("one.yaml")
    assert str(caught.value).splitlines()[0] == (
        "other/two.yaml:2: extends: one.yaml -> other/two.yaml -> one.yaml is a cycle."
    )


def test_nested_lists_and_mappings_of_pass_through_fields_come_whole_from_the_command_line(folder):
    recipe = load(
        MINIMAL,
        "trainer.megatron.pipeline_model_parallel_layout=[[embedding, decoder], [decoder, loss]]",
        "trainer.megatron.moe_aux_loss_coeff=[0, 0.5, 1]",
    ).recipe
    assert recipe.trainer.megatron["pipeline_model_parallel_layout"] == [["embedding", "decoder"], ["decoder", "loss"]]
    assert recipe.trainer.megatron["moe_aux_loss_coeff"] == [0, 0.5, 1]


def test_problems_of_keys_types_and_pass_through_sections_come_together(folder):
    lines = refused(
        MINIMAL, "stepz=1", "seed=x", "rollout.sglang.page_siez=1", "trainer.megatron.recompute_granularity=ful"
    )
    assert [line.split(": ")[1] for line in lines[:-1]] == [
        "rollout.sglang.page_siez", "seed", "stepz", "trainer.megatron.recompute_granularity",
    ]  # fmt: skip


def test_a_recipe_that_gives_the_length_of_conversations_is_for_sft(folder):
    assert intended_command(write("a.yaml", "sft: {max_tokens: 9}\n")) == "sft"
    assert intended_command(write("b.yaml", MINIMAL)) == "train"
    assert intended_command("b.yaml", ["sft.max_tokens=9"]) == "sft"


def test_overrides_take_lists_sections_and_words_that_yaml_1_1_calls_booleans(folder):
    loaded = load(
        MINIMAL, "agent.tools=[a:f, b:g]", "rollout.sampling={temperature: 0.5, top_k: 4}", "resync.verify=off",
        "data.eval.heldout=x.jsonl", "trainer.megatron.moe_aux_loss_coeff=1e-3", "agent.system_prompt=null",
    )  # fmt: skip
    assert loaded.recipe.agent.tools == ["a:f", "b:g"]
    assert (loaded.recipe.rollout.sampling.temperature, loaded.recipe.rollout.sampling.top_k) == (0.5, 4)
    assert loaded.recipe.resync.verify is VerifyMode.off
    assert loaded.recipe.data.eval == {"heldout": "x.jsonl"}
    assert loaded.recipe.trainer.megatron == {"moe_aux_loss_coeff": 0.001}


def test_interpolation_refers_to_other_keys_whatever_their_order(folder):
    text = MINIMAL + "  eval:\n    heldout: ${run.dir}/${run.name}/heldout.jsonl\nrollout.x: 1\n"
    recipe = load(text.replace("rollout.x: 1\n", ""), "run.dir=out", "rollout.prompts_per_step=${steps}").recipe
    assert recipe.data.eval["heldout"] == "out/demo/heldout.jsonl"
    assert recipe.rollout.prompts_per_step == 3


def test_an_interpolation_that_leads_nowhere_or_to_a_wrong_type_is_named(folder):
    lines = refused(MINIMAL, "rollout.num_engines=${run.name}", "rollout.max_turns=${rollout.turns}")
    assert lines[0] == (
        "command line: rollout.max_turns: '${rollout.turns}': Interpolation key 'rollout.turns' not found. "
        r"To write ${ itself, write \${."
    )
    assert lines[1] == "command line: rollout.num_engines: expected int, got 'demo'."


@pytest.mark.parametrize("reference", ["${steps}", "1"])
def test_a_list_for_a_mapping_and_the_reverse_are_wrong_types_whatever_else_refers_to_a_key(folder, reference):
    wrong = "agent:\n  tools: {a: 1}\n  environment_args: [1]\neval:\n  pass_at:\n    a: b\n"
    assert refused(MINIMAL + wrong, f"seed={reference}") == [
        "recipe.yaml:19: agent.tools: expected list[str], got {'a': 1}.",
        "recipe.yaml:20: agent.environment_args: expected dict[str, Any], got [1].",
        "recipe.yaml:22: eval.pass_at: expected list[int], got {'a': 'b'}.",
        "3 problems. Nothing was started.",
    ]


def test_a_null_key_of_a_mapping_is_named_beside_a_reference(folder):
    assert refused(MINIMAL, "agent.tool_args={x: {null: 1}}", "seed=${steps}")[:-1] == [
        "command line: agent.tool_args.x: null is no key of a mapping; write a text."
    ]


def test_what_is_no_interpolation_is_named_with_its_line_and_how_to_escape_it(folder):
    text = MINIMAL + 'agent:\n  system_prompt: "Write ${x once"\n'
    assert refused(text, "data.eval.held=${oc.env:SLIMRL_NOT_SET}")[:-1] == [
        "command line: data.eval.held: '${oc.env:SLIMRL_NOT_SET}': Environment variable 'SLIMRL_NOT_SET' not found. "
        "Set it, or give a default: ${oc.env:NAME,default}.",
        "recipe.yaml:19: agent.system_prompt: 'Write ${x once': ${ begins a reference, and this is not one. "
        r"To write ${ itself, write \${.",
    ]


@pytest.mark.parametrize("text", ["${x}", "Write ${x once", r"a\${steps}", r"\\${b} ${c", "x${y}z\\", "${"])
def test_escaped_openings_are_text_which_the_resolved_yaml_keeps(folder, text):
    written = text.replace("\\", "\\\\") if "\\$" in text else text
    prompt = written.replace("${", r"\${")
    loaded = load(MINIMAL, f"agent.system_prompt='{prompt}'", f"rollout.sglang.log_level='{prompt}'", "seed=${steps}")
    assert loaded.recipe.agent.system_prompt == loaded.recipe.rollout.sglang["log_level"] == text
    again = load_recipe(write("resolved.yaml", dump_resolved(loaded)))
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(loaded.recipe)
    assert again.recipe.seed == 3


def test_escaped_openings_within_lists_and_mappings_are_kept_by_the_resolved_yaml(folder):
    loaded = load(
        MINIMAL,
        r"rollout.sglang.prompt_tokens_buckets=['\${a}=x', plain]",
        r"agent.sandbox.packages=['\${b}']",
        "seed=${steps}",
    )
    assert loaded.recipe.rollout.sglang["prompt_tokens_buckets"] == ["${a}=x", "plain"]
    assert loaded.recipe.agent.sandbox.packages == ["${b}"]
    again = load_recipe(write("resolved.yaml", dump_resolved(loaded)))
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(loaded.recipe)
    mapping = {"a": ["${x}", 1], "b": {"c": "\\${y}"}}
    assert escaped(mapping) == {"a": [r"\${x}", 1], "b": {"c": "\\\\\\${y}"}}
    assert [is_reference(value) for value in (mapping, {"a": [r"\${x}"]}, [["${x}"]], [1, {}], None)] == [
        True, False, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.max_token", "trainer.max_tokens_per_rank"),
        ("max_tokens", "rollout.sampling.max_new_tokens (of a turn; of an example, sft.max_tokens)"),
        ("rollout.precision", "trainer.precision"),
        ("rolout.num_engine", "rollout.num_engines"),
        ("extend", "extends"),
        ("zebra", None),
        ("algorithm.formula", None),
    ],
)
def test_the_key_that_was_meant_is_one_of_that_name_or_a_sibling_before_others(key, meant):
    assert meant_key(key) == meant


def test_an_empty_section_is_none_given(folder):
    recipe = load(MINIMAL, "rollout.sglang={}", "trainer.parallel={}").recipe
    assert (recipe.rollout.sglang, recipe.trainer.parallel) == ({}, Recipe().trainer.parallel)


def test_escaped_text_is_no_number(folder):
    assert r"seed: expected int, got '${x}'." in refused(MINIMAL, r"seed=\${x}")[0]


def test_variables_of_the_environment_are_filled_in_and_become_numbers(folder, monkeypatch):
    monkeypatch.setenv("SLIMRL_TEST_NUMBER", "12")
    recipe = load(MINIMAL, "seed=${oc.env:SLIMRL_TEST_NUMBER}", "run.dir=${oc.env:SLIMRL_TEST_NUMBER}/runs").recipe
    assert (recipe.seed, recipe.run.dir) == (12, "12/runs")


def test_integers_of_other_bases_are_those_of_yaml_1_2(folder):
    assert load(MINIMAL, "seed=0x1F").recipe.seed == 31
    assert load(MINIMAL, "seed=0o17").recipe.seed == 15
    assert load(MINIMAL, "seed=017").recipe.seed == 17


def test_null_leaves_out_an_evaluation_set_that_is_inherited(folder):
    write("base.yaml", "data:\n  eval: {one: 1.jsonl, two: 2.jsonl}\n")
    text = "extends: base.yaml\n" + MINIMAL + "  eval:\n    one: null\n"
    assert load(text).recipe.data.eval == {"two": "2.jsonl"}
    assert load(text, "data.eval.one=3.jsonl").recipe.data.eval == {"one": "3.jsonl", "two": "2.jsonl"}
    assert refused(text, "data.eval.tow=null")[0] == (
        "command line: data.eval.tow: null leaves out an inherited set, and none has this name. "
        "Did you mean data.eval.two?"
    )


def test_a_value_of_a_wrong_type_is_not_judged_by_the_rules(folder):
    text = MINIMAL.replace("512", "2048").replace("256", "2048")
    settings = ["mem_fraction_static=abc", "context_length=abc", "page_size=1"]
    loaded, problems = read_recipe(write("recipe.yaml", text), [f"rollout.sglang.{setting}" for setting in settings])
    assert [problem.key for problem in problems] == [
        "rollout.sglang.context_length", "rollout.sglang.mem_fraction_static",
    ]  # fmt: skip
    assert loaded is not None
    assert loaded.recipe.rollout.sglang == {"page_size": 1}
    assert check_recipe(loaded.recipe, None, "train") == []


def test_a_recipe_from_a_pipe_is_read_as_often_as_the_command_looks_at_it(folder):
    write("base.yaml", MINIMAL)
    reading, writing = os.pipe()
    try:
        os.write(writing, b"extends: base.yaml\nsft: {max_tokens: 9}\nseed: 4\n")
        os.close(writing)
        pipe = f"/dev/fd/{reading}"
        assert intended_command(pipe) == "sft"
        loaded = load_recipe(pipe)
        assert (loaded.recipe.seed, loaded.recipe.sft.max_tokens, loaded.recipe.run.name) == (4, 9, "demo")
        assert loaded.where("seed") == f"{pipe}:3"
        assert load_recipe(pipe, ["seed=5"]).recipe.seed == 5
    finally:
        os.close(reading)


def test_a_misspelt_extends_is_the_one_problem(folder):
    assert refused("extend: base.yaml\nseed: 1\n") == [
        "recipe.yaml:1: extend: no such key. Did you mean extends?", "1 problem. Nothing was started.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.clip_hgih=1", "algorithm.clip_hgih: no such key. Did you mean algorithm.clip_high?"),
        ("trainer.lr=1", "trainer.lr: no such key. Did you mean trainer.optimizer.lr?"),
        ("algoritm.clip_high=1", "algoritm.clip_high: no such key. Did you mean algorithm.clip_high?"),
        ("zebra=1", "zebra: no such key."),
        ("trainer.num_ranks=two", "trainer.num_ranks: expected int, got 'two'."),
        ("trainer.num_ranks=2.5", "trainer.num_ranks: expected int, got 2.5."),
        ("trainer.num_ranks=null", "trainer.num_ranks: expected int, got null."),
        ("deterministic=maybe", "deterministic: expected true or false, got 'maybe'."),
        ("deterministic=on", "deterministic: expected true or false, got 'on'."),
        ("deterministic=y", "deterministic: expected true or false, got 'y'."),
        ("seed=1_000", "seed: expected int, got '1_000'."),
        ("seed=true", "seed: expected int, got True."),
        ("trainer.optimizer.lr='1'", "trainer.optimizer.lr: expected float, got '1'."),
        ("algorithm.aggregation=tokens",
         "algorithm.aggregation: 'tokens' is not one of trajectory, token, constant. Did you mean token?"),
        ("algorithm.kl_place=k3",
         "algorithm.kl_place: 'k3' is not one of loss, reward. Did you mean algorithm.kl_estimator: k3?"),
        ("rollout.sglang.schedule_policy=fcfss",
         "rollout.sglang.schedule_policy: 'fcfss' is not one of lpm, random, fcfs, dfs-weight, lof, priority, "
         "routing-key, hrrn, shortest-prefill-first. Did you mean fcfs?"),
        ("trainer.megatron.attention_backend=flsh",
         "trainer.megatron.attention_backend: 'flsh' is not one of flash, fused, unfused, local, auto. "
         "Did you mean flash?"),
        ("agent.tools=a:f", "agent.tools: expected list[str], got 'a:f'. Write [a:f]."),
        ("trainer.precision=fp23", "trainer.precision: 'fp23' is not one of fp32, bf16. Did you mean fp32?"),
        ("trainer.parallel=4", "trainer.parallel: is a section; expected keys below it, got 4."),
        ("rollout.sglang.page_siez=1",
         "rollout.sglang.page_siez: no such field in the installed version. Did you mean page_size?"),
        ("rollout.sglang.page_size=many", "rollout.sglang.page_size: expected None | int, got 'many'."),
        ("rollout.sglang.tp_size=2", "rollout.sglang.tp_size: is set by rollout.engine_tp."),
        ("rollout.sglang.nnodes=2", "rollout.sglang.nnodes: is set by rollout.engine_nodes."),
        ("rollout.sglang.port=30000", "rollout.sglang.port: is set by slimrl, for each engine."),
        ("rollout.sglang.api_key=secret",
         "rollout.sglang.api_key: is set by slimrl, which gives each run its own keys."),
        ("rollout.sglang.grpc_port=30001",
         "rollout.sglang.grpc_port: opens a port that no key of the run protects. Leave it out."),
        ("rollout.sglang.quantization=fp8",
         "rollout.sglang.quantization: is set by the config.json of model.path. `slimrl-tools quantize` writes a model "
         "for engines in FP8 (docs/algorithms.md#fp8)."),
        ("rollout.sglang.dtype=float16", "rollout.sglang.dtype: is set by trainer.precision."),
        ("trainer.megatron.exp_avg_dtype=bfloat",
         "trainer.megatron.exp_avg_dtype: 'bfloat' is not one of float32, bfloat16, float16, uint8. "
         "Did you mean bfloat16?"),
        ("trainer.megatron.recompute_granularity=ful",
         "trainer.megatron.recompute_granularity: 'ful' is not one of full, selective. Did you mean full?"),
        ("trainer.megatron.rotary_base=5.0",
         "trainer.megatron.rotary_base: is the model's: trainer and engines take their layers "
         "from the config.json of model.path. Leave it out."),
        ("trainer.megatron.mtp_num_layers=1",
         "trainer.megatron.mtp_num_layers: is set by trainer.mtp.train and the config.json of model.path."),
        ("trainer.megatron.lr=1", "trainer.megatron.lr: is set by trainer.optimizer.lr."),
        ("steps", "steps: an override is written key=value."),
        ("rollout.async=true", "rollout.async: no such key. Did you mean rollout.mode: async?"),
        ("rollout.mode=null", "rollout.mode: null is not one of sync, one_step_off, async."),
        ("agent.tools=[a",
         "agent.tools: '[a' is not YAML: a list that begins with [ needs commas between its values and a ] at its "
         "end."),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named_with_what_was_probably_meant(folder, override, message):
    assert refused(MINIMAL, override) == [f"command line: {message}", "1 problem. Nothing was started."]


def test_null_removes_all_of_an_inherited_part_of_the_reward(folder):
    parts = "  parts:\n    math: {function: 'a:b'}\n    length: {function: 'a:c', weight: 0.1, args: {most: 3}}\n"
    whole = MINIMAL.replace("  function: tasks.demo:reward\n", parts)
    write("base.yaml", whole)
    text = "extends: base.yaml\nreward: {parts: {length: null}}\n"
    assert [*load(text).recipe.reward.parts] == ["math"]
    again = load(text, "reward.parts.length.function=d:e").recipe.reward.parts["length"]
    assert (again.function, again.weight, again.args) == ("d:e", 1.0, {})
    assert [*load(whole, "reward.parts.length=null").recipe.reward.parts] == ["math"]
    assert refused(whole, "reward.parts.lenght=null")[0] == (
        "command line: reward.parts.lenght: null leaves out an inherited entry, and none has this name. "
        "Did you mean reward.parts.length?"
    )


@pytest.mark.parametrize("empty", ["{}", "{args: {}}"])
def test_a_part_with_a_name_and_without_settings_is_refused_and_not_left_out_in_silence(folder, empty: str):
    said = refused(MINIMAL.replace("  function: tasks.demo:reward\n", f"  function: a:b\n  group: {{math: {empty}}}\n"))
    message = "reward.group.math: has no settings, so it would not be there. Give one, or leave it out."
    assert any(one.endswith(message) for one in said), said


def test_all_problems_are_listed_at_once_each_with_its_line(folder):
    text = MINIMAL.replace("steps: 3", "stepz: 3").replace("lr: 1e-6", "lr: fast") + "  train: twice\n"
    assert refused(text, "seed=x") == [
        "command line: seed: expected int, got 'x'.",
        "recipe.yaml:1: stepz: no such key. Did you mean steps?",
        "recipe.yaml:9: trainer.optimizer.lr: expected float, got 'fast'.",
        "recipe.yaml:18: data.train: given twice, first at recipe.yaml:17.",
        "recipe.yaml: steps: missing; `slimrl train` needs a value.",
        "5 problems. Nothing was started.",
    ]


def test_sft_needs_no_rollout_and_train_no_sft_settings(folder):
    text = "steps: 1\nrun: {name: a}\nmodel: {path: m}\ndata: {train: t}\nsft: {max_tokens: 9}\n"
    text += "trainer: {max_tokens_per_rank: 16, optimizer: {lr: 1}}\n"
    assert load_recipe(write("sft.yaml", text), command="sft").recipe.sft.max_tokens == 9
    with pytest.raises(RecipeError) as caught:
        load_recipe("sft.yaml", command="train")
    assert {problem.key for problem in caught.value.problems} == {
        "algorithm.max_logprob_mismatch", "rollout.max_trajectory_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: other.yaml\n", "recipe.yaml:1: extends: other.yaml: No such file or directory."),
        ("extends: recipe.yaml\n", "recipe.yaml:1: extends: recipe.yaml -> recipe.yaml is a cycle."),
        (
            "a: [1\nb: 2\n",
            "recipe.yaml:2: not YAML: a list that begins with [ needs commas between its values and a ] at its end.",
        ),
        ("- 1\n", "recipe.yaml:1: a recipe is a mapping of keys to values."),
    ],
)
def test_an_unreadable_recipe_is_one_problem(folder, text, message):
    assert refused(text) == [message, "1 problem. Nothing was started."]


def test_a_missing_recipe_file_is_one_problem(folder):
    with pytest.raises(RecipeError, match=r"^absent.yaml: No such file or directory.\n1 problem"):
        load_recipe("absent.yaml")


def test_sections_without_settings_are_shown_as_one_that_is_empty(folder):
    shown = {key: (value, origin) for key, value, origin in show(load(MINIMAL, "rollout.sglang.page_size=1"))}
    assert shown["trainer.megatron"] == shown["data.eval"] == ("{}", "default")
    assert shown["rollout.sglang.page_size"] == ("1", "command line")
    assert "rollout.sglang" not in shown
    assert shown["resync.verify"][0] == VerifyMode.sampled.value
    assert show(load_recipe(write("sft.yaml", "sft: {max_tokens: 9}\n" + MINIMAL), command="sft"))
    evaluated = load_recipe(write("eval.yaml", MINIMAL.replace("steps: 3\n", "")), command="eval")
    assert ("steps", "-", "default") in show(evaluated)
    assert "steps" not in yaml.safe_load(dump_resolved(evaluated))


def test_the_resolved_yaml_reads_back_as_the_same_recipe(folder):
    loaded = load(MINIMAL, "agent.tools=['a:f']", "data.eval.x=y", "rollout.sglang.page_size=1", "resync.verify=off")
    again = load_recipe(write("resolved.yaml", dump_resolved(loaded)))
    assert dataclasses.asdict(again.recipe) == dataclasses.asdict(loaded.recipe)


def test_megatron_fields_are_those_of_the_imported_classes():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    classes = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    assert set(megatron_fields()) == {
        field.name for cls in classes for field in dataclasses.fields(cls) if not field.name.startswith("_")
    }
    assert megatron_fields()["attention_backend"].choices == tuple(AttnBackend.__members__)


def test_sglang_fields_are_those_of_its_own_list_of_arguments():
    tree = ast.parse((package_folder("sglang") / "srt" / "arg_groups" / "field_order.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    names = {name for name in ast.literal_eval(lists[0]) if not name.startswith("_")}
    assert set(sglang_fields()) == names


def test_words_of_sglang_fields_are_the_lists_that_its_source_makes_when_it_runs():
    lists = runpy.run_path(str(package_folder("sglang") / "srt" / "arg_groups" / "choices.py"))
    fields = sglang_fields()
    for name, words in {
        "attention_backend": "ATTENTION_BACKEND_CHOICES", "quantization": "QUANTIZATION_CHOICES",
        "moe_runner_backend": "MOE_RUNNER_BACKEND_CHOICES", "grammar_backend": "GRAMMAR_BACKEND_CHOICES",
    }.items():  # fmt: skip
        assert fields[name].words == tuple(lists[words])
    assert fields["log_requests_format"].words == ("text", "json")
    assert fields["served_model_name"].words == ()


def test_lists_of_a_packages_source_are_taken_as_they_are_written_and_nothing_else_is(tmp_path):
    (tmp_path / "choices.py").write_text("A = ['x', 1]\nB = ('y',)\nC = 'word'\nD = 3\nE = list(range(3))\nF = A\n")
    assert package_fields._named_lists(tmp_path / "choices.py") == {
        "A": ("x", 1), "B": ("y",), "C": (), "D": (), "E": (), "F": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("bool", [True, False], [1, 0, None, "true"]),
        ("int", [1, 0], [True, 1.0, None, "1"]),
        ("float", [1.5, 1], [True, None, "1"]),
        ("str | None", ["a", None], [1, True]),
        ("Optional[int]", [1, None], [1.5, "a"]),
        ("Union[int, str]", [1, "a"], [None, 1.5]),
        ("Annotated[float, Arg(help='x')]", [1, 0.5], ["a", None]),
        ("list[int]", [[1]], [1, {}]),
        ("Dict[str, int] | Tuple[int, ...]", [{}, [1]], ["a", 1]),
        ("Literal['a', 'b']", ["a", "b"], ["c", None, 1]),
        ("Optional[Literal['a']]", ["a", None], ["b"]),
        ("torch.dtype", ["float32", "uint8"], ["fp32", 1]),
        ("AttnBackend", ["flash"], ["flesh", None]),
        ("Callable[[int], int]", [], [1, "a", None]),
        ("SomeClass", [1, "a", None, [1]], []),
        ("'SomeClass'", [1, "a", None, [1]], []),
    ],
)
def test_a_field_of_a_package_takes_what_its_annotation_says(annotation, right, wrong):
    field = package_fields._field_type(ast.parse(annotation, mode="eval").body, {"AttnBackend": ("flash",)})
    assert [value for value in [*right, *wrong] if field.accepts(value)] == right


def test_words_of_a_field_hold_for_each_element_unless_another_parser_reads_them():
    def words(annotation):
        return package_fields._field_type(ast.parse(annotation, mode="eval").body, {"NAMED": ("x", "y")})

    listed = words("Annotated[list[str] | None, Arg(choices=NAMED)]")
    assert listed.words == ("x", "y")
    assert listed.unknown(["x", "z"]) == ["z"]
    assert listed.unknown(None) == []
    assert words("A[str, Arg(choices=['a', 'b'])]").unknown("c") == ["c"]
    assert words("A[str, Arg(choices=NAMED, type_parser=str)]").words == ()
    assert words("A[str, Other(choices=NAMED)]").words == ()


def test_the_configuration_imports_without_torch_in_an_eighth_of_the_time_that_its_import_takes():
    code = (
        "import slimrl.config.load, slimrl.config.check, slimrl.config.show, slimrl.config.reference, sys\n"
        "heavy = {'torch', 'numpy', 'ray', 'megatron', 'sglang', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert takes_less(code, 1 / 8, "import torch\n", rounds=3)


def test_the_name_of_an_algorithm_brings_its_settings_and_the_recipe_changes_them(folder):
    loaded = load(MINIMAL, "algorithm.name=dapo", "algorithm.clip_low=0.1")
    algorithm = loaded.recipe.algorithm
    assert (algorithm.loss, algorithm.clip_low, algorithm.clip_high) == ("ppo", 0.1, 0.28)
    assert algorithm.aggregation is Aggregation.token
    origin = {key: loaded.provenance[f"algorithm.{key}"] for key in ("clip_low", "clip_high", "dual_clip")}
    assert origin == {"clip_low": "command line", "clip_high": "command line (algorithm dapo)", "dual_clip": "default"}


def test_an_algorithm_from_the_environment_is_named_in_the_origin_of_its_settings(folder, monkeypatch):
    monkeypatch.setenv("SLIMRL_TEST_ALGORITHM", "dapo")
    loaded = load(MINIMAL, "algorithm.name=${oc.env:SLIMRL_TEST_ALGORITHM}")
    assert loaded.recipe.algorithm.clip_high == 0.28
    assert loaded.provenance["algorithm.clip_high"] == "command line (algorithm dapo)"


def test_an_inherited_setting_stays_when_the_name_changes(folder):
    """What a file says is never replaced by what a name stands for."""
    loaded = load(MINIMAL.replace("algorithm:\n", "algorithm:\n  clip_high: 0.5\n"), "algorithm.name=grpo")
    assert (loaded.recipe.algorithm.clip_low, loaded.recipe.algorithm.clip_high) == (0.2, 0.5)


def test_a_run_folder_is_not_a_recipe_and_holds_one(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RecipeError, match=f"{tmp_path}: a run folder, whose recipe is {tmp_path}/config.yaml"):
        load_recipe(tmp_path)
