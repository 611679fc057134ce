"""What a recipe with a teacher is refused for, before anything starts."""

import json
from pathlib import Path

import pytest
from fake_hub import COMMIT
from recipe_problems import recipe_problems
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.config.check import check_loaded
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.estimates.planner.engine import GIB
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.teacher import plan_teacher
from slimrl.models.hf_config import published_config
from slimrl.models.offline_recipe import read_offline
from slimrl.observability.progress import Progress
from slimrl.runtime.checks.fetched_model import fetch_model
from slimrl.runtime.checks.teacher_check import key_of_others, other_vocabulary, teacher_problems

RECIPES = Path(__file__).parents[2] / "recipes"
POLICY = RECIPES / "qwen3" / "qwen3_4b_gspo.yaml"
TEACHER = published_config("Qwen3-30B-A3B")
STUDENT = published_config("Qwen3-4B")


def found(*overrides: str, teacher_config=TEACHER, command="train") -> dict[str, str]:
    problems = recipe_problems(POLICY, overrides, STUDENT, command, teacher_config=teacher_config)
    return {problem.key: problem.message for problem in problems if not problem.warning}


def test_a_teacher_that_fits_has_no_problems_and_none_is_no_teacher():
    assert found("teacher.path=models/Qwen3-30B-A3B", "teacher.engine_tp=4", "teacher.engine_ep=2") == {}
    assert found("teacher.urls=[http://node7:30000, https://a.b/]", teacher_config=None) == {}
    assert found(teacher_config=None) == {}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["teacher.num_engines=2"], "teacher.num_engines", "there is no teacher. Set teacher.path or teacher.urls."),
        (["teacher.sglang.page_size=1"], "teacher.sglang", "there is no teacher."),
        (["teacher.path=m", "teacher.urls=[http://a:1]"], "teacher.urls", "Give one of the two."),
        (["teacher.urls=[node7]"], "teacher.urls", "'node7' is not the address of a server. Write http://HOST:PORT."),
        (["teacher.path=m", "teacher.api_key_env=KEY"], "teacher.api_key_env", "teacher.urls names none."),
        (["teacher.urls=[http://a:1]", "deterministic=true"], "teacher.urls", "cannot repeat its scores"),
        (["teacher.path=m", "rollout.sampling.temperature=0.7"], "rollout.sampling.temperature", "0.7: SGLang scores"),
        (["teacher.path=m", "teacher.engine_tp=0"], "teacher.engine_tp", "must be at least 1"),
        (["teacher.path=m", "teacher.max_concurrency_per_engine=0"], "teacher.max_concurrency_per_engine", "at least"),
        (
            ["teacher.path=m", "teacher.engine_tp=4", "teacher.engine_ep=3"],
            "teacher.engine_ep",
            "3 does not divide teacher.engine_tp 4.",
        ),
        (
            ["teacher.path=m", "teacher.engine_tp=4", "teacher.engine_nodes=3"],
            "teacher.engine_nodes",
            "3 does not divide teacher.engine_tp 4. Use 2 or 4.",
        ),
        (["teacher.path=m", "teacher.engine_tp=3"], "teacher.engine_tp", "3 neither divides the model's 4"),
        (["teacher.path=m", "teacher.sglang.mem_fraction_static=2"], "teacher.sglang.mem_fraction_static", "2: must"),
        (["teacher.path=m", "teacher.env.OMP_NUM_THREADS=3"], "teacher.env.OMP_NUM_THREADS", "by rollout.threads_per"),
        (["teacher.path=$HOME/m"], "teacher.path", "is not expanded"),
        (
            ["teacher.path=m", "teacher.sglang.context_length=4096", "rollout.max_trajectory_tokens=4096"],
            "rollout.max_trajectory_tokens",
            "4096: the teacher scores less than its 4096 positions. Use 4095 or less, or set teacher.sglang.context",
        ),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_be_is_named_with_the_key(overrides, key, message):
    problems = found(*overrides)
    assert message in problems[key], problems


def test_a_teacher_lacks_no_token_of_the_policy_and_may_have_more():
    size = STUDENT["vocab_size"]
    assert found("teacher.path=m", teacher_config={**TEACHER, "vocab_size": size + 128}) == {}
    problems = found("teacher.path=m", teacher_config={**TEACHER, "vocab_size": size - 128})
    assert problems == {
        "teacher.path": f"m: its vocab_size {size - 128} is below the {size} of the policy, which can sample tokens "
        "that the teacher lacks."
    }


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("model_path: x", "is set by teacher.path."),
        ("tp_size: 2", "is set by teacher.engine_tp."),
        ("pp_size: 2", "is set by teacher.engine_tp and teacher.engine_nodes."),
        ("enable_return_routed_experts: true", "only scores."),
        ("page_sise: 2", "no such field in the installed version. Did you mean page_size?"),
    ],
)
def test_fields_of_sglang_are_checked_as_those_of_a_rollout(field, said):
    name, value = field.split(": ")
    with pytest.raises(RecipeError, match=said):
        load_recipe(POLICY, ["teacher.path=m", f"teacher.sglang.{name}={value}"])
    # A teacher may be quantised as it loads, and keep its experts where it likes: no resync places its weights.
    load_recipe(POLICY, ["teacher.path=m", "teacher.sglang.quantization=fp8", "teacher.sglang.moe_a2a_backend=deepep"])


def test_a_teacher_that_is_not_here_is_refused_by_the_commands_that_need_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for path, said in (("nowhere", "no such folder"), ("empty", "has no config.json")):
        for command, refused in (("train", True), ("rollout", True), ("eval", False), ("train --trajectories", False)):
            loaded = load_recipe(POLICY, [f"teacher.path={path}"], command=command)
            messages = [p.message for p in check_loaded(loaded) if p.key == "teacher.path"]
            assert len(messages) == refused
            assert all(said in message for message in messages)


def test_every_token_of_the_policy_is_the_same_in_the_teacher_s_tokenizer():
    policy, teacher = build_tokenizer(), build_tokenizer()
    assert other_vocabulary(policy, teacher) == ""
    teacher.add_tokens(["<more>"])
    assert other_vocabulary(policy, teacher) == ""
    size = len(policy)
    policy.add_tokens(["<think>"])
    assert (
        f"but 1 of the policy's {size + 1} tokens are others in its tokenizer: {size} is '<think>', there '<more>'."
        in (other_vocabulary(policy, teacher))
    )
    assert f"{size} is '<think>', there no token." in other_vocabulary(policy, build_tokenizer())


def test_a_recipe_with_another_tokenizer_is_refused(tmp_path, monkeypatch):
    for name in ("policy", "teacher"):
        tokenizer = build_tokenizer()
        if name == "policy":
            tokenizer.add_tokens(["<think>"])
        tokenizer.save_pretrained(tmp_path / name)
    overrides = [f"model.path={tmp_path / 'policy'}", f"teacher.path={tmp_path / 'teacher'}"]
    (problem,) = teacher_problems(load_recipe(POLICY, overrides))
    assert problem.key == "teacher.path"
    assert "the teacher must read tokens as the policy does" in problem.message
    assert teacher_problems(load_recipe(POLICY, [overrides[0], f"teacher.path={tmp_path / 'policy'}"])) == []
    assert teacher_problems(load_recipe(POLICY, overrides, command="eval")) == []
    # Servers are not asked for a start on other machines.
    assert (
        teacher_problems(load_recipe(POLICY, [overrides[0], "teacher.urls=[http://127.0.0.1:9]"]), servers=False) == []
    )
    (tmp_path / "policy" / "config.json").write_text('{"vocab_size": 8}')
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    keyed = [overrides[0], "teacher.urls=[http://127.0.0.1:9]", "teacher.api_key_env=NO_SUCH_KEY"]
    (problem,) = teacher_problems(load_recipe(POLICY, keyed))
    assert (problem.key, problem.message) == ("teacher.api_key_env", "the environment has no variable NO_SUCH_KEY.")
    # What no header can have is not sent, and not shown; white space around a key is no part of it.
    for value in ("top\nsecret", "tops\u00e9cret", "top\tsecret"):
        monkeypatch.setenv("NO_SUCH_KEY", value)
        (problem,) = teacher_problems(load_recipe(POLICY, keyed))
        assert problem.key == "teacher.api_key_env"
        assert "NO_SUCH_KEY" in problem.message
        assert "top" not in problem.message
        assert "cret" not in problem.message
    monkeypatch.setenv("NO_SUCH_KEY", " topsecret\n")
    (problem,) = teacher_problems(load_recipe(POLICY, keyed))
    assert problem.key == "teacher.urls"
    assert "no teacher answers there: ConnectError" in problem.message
    assert "topsecret" not in problem.message
    key = key_of_others(load_recipe(POLICY, keyed).recipe.teacher)
    assert key is not None
    assert key.value == "topsecret"


def test_a_teacher_of_the_hub_is_fetched_and_named_by_its_folder(tmp_path, monkeypatch):
    import huggingface_hub

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folders = {}
    for model_id, config in (("Qwen/Qwen3-4B", STUDENT), ("Qwen/Qwen3-30B-A3B", TEACHER)):
        folders[model_id] = cache / f"models--{model_id.replace('/', '--')}" / "snapshots" / COMMIT
        folders[model_id].mkdir(parents=True)
        refs = folders[model_id].parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text(COMMIT)
        (folders[model_id] / "config.json").write_text(json.dumps(config))
        (folders[model_id] / "model.safetensors").write_text("")
    given = ["model.path=Qwen/Qwen3-4B", "teacher.path=Qwen/Qwen3-30B-A3B", f"data.train={__file__}"]
    given += [f"data.eval.{name}={__file__}" for name in load_recipe(POLICY).recipe.data.eval]
    with Progress(0) as progress:
        recipe = fetch_model(load_recipe(POLICY, given), [], progress).recipe
        assert (recipe.model.path, recipe.teacher.path) == tuple(map(str, folders.values()))
        with pytest.raises(RecipeError, match=r"teacher\.path: Qwen/Qwen3-nothing: no such folder, not whole in the c"):
            fetch_model(load_recipe(POLICY, [*given, "teacher.path=Qwen/Qwen3-nothing"]), [], progress)


def test_the_plan_of_a_teacher_has_its_weights_over_its_ranks():
    overrides = ["teacher.path=models/Qwen3-30B-A3B", "teacher.engine_tp=4", "teacher.engine_ep=4"]
    planned = read_offline(POLICY, overrides, "train")
    hardware = Hardware()
    plan = plan_teacher(planned, hardware)
    assert plan is not None
    # 30.5 billion parameters in bfloat16 on four ranks, each with its own copy of routers and norms.
    assert plan.parameters.total == 30_532_122_624
    assert 1 <= plan.engine.weights / (30_532_122_624 * 2 / 4) < 1.005
    assert plan.gpu_bytes <= hardware.gpu_memory_gib * GIB
    assert plan.problems == []
    small = plan_teacher(planned, Hardware(gpu_memory_gib=16))
    assert small is not None
    assert small.problems
    assert all(problem.startswith("teacher: ") and "rollout." not in problem[:60] for problem in small.problems)
    assert plan_teacher(read_offline(POLICY, [], "train"), hardware) is None
