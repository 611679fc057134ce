"""What a user gets wrong is refused by one clear error with exit code 2, before a process or a run folder is made."""

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from slimrl_tools.cli import app as tools
from slimrl_tools.toy.calculator_data import write_calculator_data
from slimrl_tools.toy.toy import ToySize, write_toy
from typer.testing import CliRunner, Result

from slimrl.cli import app
from slimrl.config.load import load_recipe
from slimrl.models.architecture import FACTS_FILE, architecture_of
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.run_folder import open_run_folder
from slimrl.runtime.checks.folder_check import folder_problems

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
GSPO, SFT = RECIPES / "gspo_calculator.yaml", RECIPES / "sft.yaml"

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad_input")
    write_toy("qwen3_moe", path / "model", ToySize(layers=2, hidden=32, heads=2, kv_heads=1, moe_intermediate=32), 0)
    write_calculator_data(path / "data", seed=0, num_train=8, num_heldout=4, num_conversations=8)
    return path


@pytest.fixture
def cli(workspace: Path, tmp_path: Path) -> Cli:
    """Calls `slimrl COMMAND RECIPE` with the workspace's model and data, laid under what the test overrides."""

    def call(command: str, *arguments: str, recipe: Path | None = None) -> Result:
        recipe = recipe or (SFT if command == "sft" else GSPO)
        data = workspace / "data"
        settings = [
            f"run.dir={tmp_path / 'runs'}",
            f"model.path={workspace / 'model'}",
            f"data.train={data / ('sft.jsonl' if command == 'sft' else 'train.jsonl')}",
        ]
        if command != "sft":
            settings.append(f"data.eval.heldout={data / 'heldout.jsonl'}")
        return CliRunner().invoke(app, [command, str(recipe), *settings, *arguments])

    return call


@pytest.fixture(autouse=True)
def _nothing_starts(tmp_path: Path, request: pytest.FixtureRequest):
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    if "interrupted_run" not in request.fixturenames:
        assert not (tmp_path / "runs").exists()


@pytest.fixture
def interrupted_run(tmp_path: Path, workspace: Path) -> Path:
    """A run folder of the SFT recipe with a checkpoint of the workspace's model, as far as the driver reads it."""
    run = open_run_folder(tmp_path / "runs", "sft", "steps: 2\n")
    trainer = run.checkpoints / "step_000001" / "trainer"
    trainer.mkdir(parents=True)
    facts = {"architecture": architecture_of(read_hf_config(workspace / "model")), "layout": {}}
    (trainer / FACTS_FILE).write_text(json.dumps(facts))
    state = {"step": 1, "cursor": {"epoch": 0, "index": 4, "num_items": 8}}
    (trainer.parent / "state.json").write_text(json.dumps(state))
    return run.path


def refused(result: Result, *texts: str) -> None:
    """Exit code 2 and an error with these texts and no traceback."""
    assert result.exit_code == 2, f"{result.exit_code}: {result.output}"
    for text in texts:
        assert text in result.stderr, result.stderr
    assert "Traceback" not in result.output


def test_an_unknown_key_is_named_with_its_line_and_the_one_that_was_meant(cli: Cli, tmp_path: Path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {GSPO}\nalgorithm:\n  clip_hgih: 1e-3\n")
    refused(cli("train", recipe=recipe), f"{recipe}:3", "algorithm.clip_hgih", "algorithm.clip_high", "1 problem.")


def test_all_problems_of_a_recipe_are_listed_at_once(cli: Cli):
    result = cli("train", "trainer.parallel.expert=3", "rollout.samples_per_prompt=1", "data.train=/nowhere.jsonl")
    refused(result, "trainer.parallel.expert", "rollout.samples_per_prompt", "/nowhere.jsonl: no such file", "command")


def test_typos_layouts_tasks_and_files_are_listed_together(cli: Cli):
    result = cli(
        "train",
        "algorithm.clip_hgih=1e-3",
        "rollout.sglang.tp_size=2",
        "trainer.parallel.expert=3",
        "trainer.megatron.num_layers=3",
        "agent.tools=[no_such:tool]",
        "data.eval.heldout=/nowhere.jsonl",
    )
    texts = ["algorithm.clip_high", "rollout.engine_tp", "trainer.parallel.expert", "module no_such", "/nowhere"]
    refused(result, *texts, "trainer.megatron.num_layers: is the model's")
    assert result.stderr.count("/nowhere.jsonl") == 1


@pytest.mark.parametrize(
    "field", ["moe_router_fusion=true", "moe_grouped_gemm=true", "use_precision_aware_optimizer=true"]
)
def test_what_needs_transformer_engine_is_refused_without_it(cli: Cli, field: str):
    refused(cli("sft", f"trainer.megatron.{field}"), f"trainer.megatron.{field.split('=')[0]}: needs a GPU")


def test_modules_that_only_transformer_engine_recomputes_are_refused_without_it(cli: Cli):
    selective = ["trainer.megatron.recompute_granularity=selective", "trainer.megatron.recompute_modules=[layernorm]"]
    refused(cli("sft", *selective), "trainer.megatron.recompute_modules: layernorm needs a GPU and Transformer Engine.")


def test_fp8_without_transformer_engine_is_refused_and_emulation_named(cli: Cli):
    refused(
        cli("sft", "trainer.fp8=tensorwise", "trainer.precision=bf16"),
        "trainer.fp8: tensorwise needs a GPU",
        "fp8_emulation: true",
    )
    for field in ("fp8=hybrid", "fp8_recipe=mxfp8"):
        name = f"trainer.megatron.{field.split('=')[0]}"
        refused(cli("sft", f"trainer.megatron.{field}"), f"{name}: is set by trainer.fp8.")


def test_the_all_gather_dispatcher_is_refused_with_expert_parallelism(cli: Cli):
    settings = [
        "trainer.num_ranks=2",
        "trainer.parallel.expert=2",
        "trainer.megatron.moe_token_dispatcher_type=allgather",
    ]
    refused(cli("sft", *settings), "trainer.megatron.moe_token_dispatcher_type", "Use alltoall")


@pytest.mark.parametrize("recipe_dir", ["command line", "recipe"])
def test_buckets_that_a_tensor_does_not_fit_into_are_refused_with_the_size_that_is_enough(
    cli: Cli, tmp_path: Path, recipe_dir: str
):
    # The widest row of the toy: 64 elements in float32, of an attention output.
    tensor = "model.layers.0.self_attn.o_proj.weight"
    text = (
        f"resync.bucket_bytes: 100 bytes are too few: one row of {tensor} has 256, and a trainer rank needs room for 2"
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {GSPO}\nresync:\n  bucket_bytes: 100\n")
    if recipe_dir == "recipe":
        refused(cli("train", recipe=recipe), f"{recipe}:3: {text}", "Use 1024 or more")
    else:
        refused(cli("train", "resync.bucket_bytes=100"), f"command line: {text}", "Use 1024 or more")


def test_folders_that_cannot_be_made_are_refused_and_others_are_not_left_behind(cli: Cli, tmp_path: Path):
    settings = ["resync.transport=delta", f"resync.dir={tmp_path / 'versions' / 'here'}"]
    result = cli("train", *settings, "resync.local_dir=/proc/nope")
    refused(result, "command line: resync.local_dir: /proc/nope cannot be written: ", "1 problem.")
    assert not (tmp_path / "versions").exists()
    (tmp_path / "file").touch()
    refused(cli("train", *settings, f"resync.local_dir={tmp_path / 'file'}"), "resync.local_dir", "Not a directory")
    refused(cli("sft", "run.dir=/proc/nope"), "run.dir: /proc/nope cannot be written")


def test_folders_on_the_disks_of_other_nodes_are_not_tried_on_this_machine():
    settings = ["resync.transport=delta", "resync.local_dir=/proc/nope", "resync.dir=/proc/nowhere", "run.dir=/proc/no"]
    loaded = load_recipe(GSPO, [*settings, "model.path=m"], "train")
    assert [problem.key for problem in folder_problems(loaded)] == ["run.dir", "resync.dir", "resync.local_dir"]
    assert [problem.key for problem in folder_problems(loaded, shared_only=True)] == ["run.dir", "resync.dir"]


def test_a_missing_recipe_is_named(cli: Cli, tmp_path: Path):
    refused(cli("train", recipe=tmp_path / "absent.yaml"), str(tmp_path / "absent.yaml"))


def test_a_missing_model_folder_is_named(cli: Cli):
    refused(cli("train", "model.path=/nowhere"), "model.path", "/nowhere: no such folder")


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["trainer.num_ranks=3", "trainer.parallel.expert=3"], ["expert", "8 experts", "Use 1."]),
        (["trainer.num_ranks=2", "trainer.parallel.expert=4"], ["trainer.parallel.expert", "num_ranks 2"]),
        (["trainer.num_ranks=3", "trainer.parallel.expert=1", "trainer.parallel.pipeline=3"], ["2 layers"]),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(cli: Cli, overrides: list[str], texts: list[str]):
    refused(cli("train", *overrides), *texts)


def test_a_warm_up_as_long_as_the_run_is_refused(cli: Cli):
    refused(cli("sft", "steps=20"), "trainer.optimizer.warmup_updates", "20 updates")


def test_broken_lines_of_a_prompt_file_are_named(cli: Cli, tmp_path: Path):
    data = tmp_path / "broken.jsonl"
    lines = [{"prompt": "1+1", "label": "2"}, {"prompt": "1+2"}, {"label": "3"}, {"prompt": "2+2", "label": "4"}]
    data.write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n")
    result = cli("train", f"data.train={data}")
    refused(
        result,
        f"{data}:2: `label` is missing",
        f"{data}:3",
        f"{data}:5: not JSON",
        "3 broken lines",
        "\n3 problems. Nothing was started.",
    )


def test_broken_lines_of_a_conversation_file_are_named(cli: Cli, tmp_path: Path):
    data = tmp_path / "broken.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n{"text": "hello"}\n')
    refused(cli("sft", f"data.train={data}"), f"{data}:1", f"{data}:2", "data.train")


def test_a_conversation_above_the_token_limit_is_named(cli: Cli, workspace: Path):
    refused(cli("sft", "sft.max_tokens=8"), f"{workspace / 'data' / 'sft.jsonl'}:1", "sft.max_tokens is 8")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("reward.function", "slimrl.rewards.math:no_such", "has no no_such"),
        ("reward.function", "slimrl.rewards.math:boxed", "has no boxed. Did you mean boxed_exact?"),
        ("reward.function", "no_such_module:reward", "no module no_such_module"),
        ("agent.tools", "[slimrl.agent.calculator:no_such]", "has no no_such"),
        ("reward.group_filters", "[not a path]", "module:function"),
        (
            "agent.parser",
            "telepathy",
            "'telepathy' is neither a parser of SGLang nor an import path module:name. SGLang has apertus",
        ),
        ("agent.parser", "slimrl.agent.parsers:NoCallz", "Did you mean NoCalls?"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_refused(cli: Cli, key: str, value: str, text: str):
    refused(cli("train", f"{key}={value}"), key, text)


def test_a_model_whose_config_does_not_match_its_weights_is_refused(cli: Cli, workspace: Path, tmp_path: Path):
    model = copy_of_model(workspace, tmp_path, hidden_size=48)
    refused(cli("train", f"model.path={model}"), "model.path", "embed_tokens", "48")


def test_a_model_of_an_unknown_family_is_refused(cli: Cli, workspace: Path, tmp_path: Path):
    model = copy_of_model(workspace, tmp_path, model_type="elephant")
    refused(cli("sft", f"model.path={model}"), "model.path", "elephant")


def test_a_quantised_model_whose_config_keeps_one_of_the_matrices_that_engines_fuse_is_refused(
    cli: Cli, workspace: Path, tmp_path: Path
):
    made = CliRunner().invoke(tools, ["quantize", str(workspace / "model"), str(tmp_path / "fp8")])
    assert made.exit_code == 0, made.output
    file = tmp_path / "fp8" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["modules_to_not_convert"].append("model.layers.0.self_attn.q_proj")
    file.write_text(json.dumps(config))
    refused(cli("train", f"model.path={tmp_path / 'fp8'}"), "model.path", "self_attn.q_proj", "name both or neither")


def test_weights_in_megatrons_format_of_another_model_are_refused(cli: Cli, workspace: Path, tmp_path: Path):
    weights = tmp_path / "megatron"
    weights.mkdir()
    refused(cli("train", f"model.megatron={weights}"), "model.megatron", "not a checkpoint, it has no checkpoint.json")
    architecture = {**architecture_of(read_hf_config(workspace / "model")), "num_layers": 3}
    (weights / FACTS_FILE).write_text(json.dumps({"architecture": architecture}))
    refused(cli("sft", f"model.megatron={weights}"), "model.megatron", "num_layers is 3 there and 2 here")


def test_a_model_without_a_tokenizer_is_refused(cli: Cli, workspace: Path, tmp_path: Path):
    model = copy_of_model(workspace, tmp_path)
    (model / "tokenizer.json").unlink()
    refused(cli("train", f"model.path={model}"), "model.path", "tokenizer")


def test_resuming_a_run_that_does_not_exist_is_refused(cli: Cli, tmp_path: Path):
    refused(cli("train", "--resume"), f"{tmp_path / 'runs' / 'gspo'}: there is no run to resume. Start")


def test_a_run_that_exists_is_neither_overwritten_nor_continued_unasked(cli: Cli, interrupted_run: Path):
    refused(cli("sft"), f"{interrupted_run} exists", "--resume", "--overwrite")
    assert (interrupted_run / "checkpoints" / "step_000001" / "state.json").is_file()


def test_resuming_with_another_model_is_refused(cli: Cli, interrupted_run: Path, tmp_path: Path):
    other = tmp_path / "other"
    write_toy("qwen3_moe", other, ToySize(layers=3, hidden=32, heads=2, kv_heads=1, moe_intermediate=32), 0)
    refused(
        cli("sft", "--resume", f"model.path={other}"), "a checkpoint of another model", "num_layers is 2 there and 3"
    )


def test_resuming_with_another_data_file_is_refused(cli: Cli, interrupted_run: Path, workspace: Path, tmp_path: Path):
    shorter = tmp_path / "shorter.jsonl"
    lines = (workspace / "data" / "sft.jsonl").read_text().splitlines(keepends=True)
    shorter.write_text("".join(lines[:5]))
    refused(cli("sft", "--resume", f"data.train={shorter}"), str(shorter), "8 items, but there are 5 now")


def test_resuming_a_complete_run_is_refused(cli: Cli, interrupted_run: Path):
    (interrupted_run / "export" / "hf").mkdir(parents=True)
    settings = ["steps=1", "trainer.optimizer.warmup_updates=0"]
    refused(cli("sft", "--resume", *settings), f"{interrupted_run} is complete: step 1 of 1", "larger `steps`")


def test_resume_and_overwrite_together_are_refused(cli: Cli):
    refused(cli("train", "--resume", "--overwrite"), "--resume", "--overwrite")


def test_evaluating_a_checkpoint_that_does_not_exist_is_refused(cli: Cli, tmp_path: Path):
    absent = tmp_path / "absent"
    refused(cli("eval", "--checkpoint", str(absent)), f"--checkpoint {absent}: no such folder")
    refused(cli("eval", "--checkpoint", str(tmp_path)), f"--checkpoint {tmp_path}: holds no config.json")


def test_evaluating_a_training_checkpoint_names_the_command_that_turns_it_into_another(cli: Cli, interrupted_run: Path):
    checkpoint = interrupted_run / "checkpoints" / "step_000001"
    refused(cli("eval", "--checkpoint", str(checkpoint)), f"--checkpoint {checkpoint}: ", f"slimrl export {GSPO}")


def test_training_on_a_file_that_holds_no_trajectories_is_refused(cli: Cli, tmp_path: Path):
    path = tmp_path / "trajectories.jsonl"
    refused(cli("train", "--trajectories", str(path), "--steps", "1"), f"{path}: no such file")
    path.write_text("")
    refused(cli("train", "--trajectories", str(path), "--steps", "1"), "the file has no lines")
    path.write_text('{"group_id": "a"}\n')
    refused(
        cli("train", "--trajectories", str(path), "--steps", "1"),
        f"{path}:1: not a trajectory: `trajectory_id`, `segments`, `status` are missing",
    )


def test_training_on_a_trajectory_file_asks_for_no_prompts(cli: Cli, tmp_path: Path):
    result = cli("train", "data.train=/nowhere.jsonl", "--trajectories", str(tmp_path / "absent"), "--steps", "1")
    refused(result, f"{tmp_path / 'absent'}: no such file")
    assert "/nowhere.jsonl" not in result.stderr


def test_steps_without_a_trajectory_file_are_refused(cli: Cli):
    refused(cli("train", "--steps", "3"), "--trajectories and --steps go together")


def test_exporting_a_checkpoint_that_does_not_exist_is_refused(cli: Cli, tmp_path: Path):
    result = cli("export", "--checkpoint", str(tmp_path / "absent"), "--out", str(tmp_path / "out"))
    refused(result, f"{tmp_path / 'absent'}")


def copy_of_model(workspace: Path, tmp_path: Path, **changes: object) -> Path:
    """The workspace's model with another config."""
    model = tmp_path / "model"
    model.mkdir()
    for path in (workspace / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    return model
