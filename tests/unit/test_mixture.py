"""Training on several files with weights, and prompts that are left out because they are long."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from recipe_problems import recipe_problems
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.config.check import file_violations
from slimrl.config.load import LoadedRecipe, load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.data.mixture import Mixture
from slimrl.data.prompts import Sampler
from slimrl.rollout.task.task import load_task
from slimrl.runtime import training
from slimrl.runtime.sft import read_examples
from slimrl.runtime.state import RunState

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
FILES = {"train": [f"t{i}" for i in range(10)], "gsm8k": [f"g{i}" for i in range(4)], "aime": ["a0", "a1", "a2"]}
WEIGHTS = {"train": 5, "gsm8k": 2, "aime": 1}


def mixture(weights: dict[str, float] = WEIGHTS, *, seed: int = 3, shuffle: bool = True) -> Mixture[str]:
    return Mixture({name: FILES[name] for name in weights}, weights, seed=seed, shuffle=shuffle)


def test_at_any_time_each_file_has_given_its_share_to_less_than_one_item():
    taken = mixture().take(400)
    for count in range(1, 401):
        given = Counter(item[0] for item in taken[:count])
        for name, weight in WEIGHTS.items():
            assert abs(given[name[0]] - Fraction(weight, 8) * count) < 1, (count, name)


def test_each_file_is_gone_through_whole_before_it_begins_again():
    taken = mixture().take(400)
    for name, items in FILES.items():
        of_file = [item for item in taken if item[0] == name[0]]
        epochs = [of_file[at : at + len(items)] for at in range(0, len(of_file) - len(items) + 1, len(items))]
        assert len(epochs) >= 10
        assert all(sorted(epoch) == items for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_seed_decides_the_order_and_not_from_which_file():
    first, same, other = mixture().take(80), mixture().take(80), mixture(seed=4).take(80)
    assert first == same != other
    assert [item[0] for item in first] == [item[0] for item in other]
    in_order = [item for item in mixture(shuffle=False).take(80) if item[0] == "g"]
    assert in_order[:5] == ["g0", "g1", "g2", "g3", "g0"]


@pytest.mark.parametrize("taken", [0, 1, 7, 8, 33, 1000])
def test_a_restored_mixture_goes_on_with_what_would_have_come_next(taken):
    weights = {"train": 0.55, "gsm8k": 0.3, "aime": 0.1501}
    uninterrupted, resumed = mixture(weights), mixture(weights)
    uninterrupted.take(taken)
    resumed.restore(json.loads(json.dumps(uninterrupted.state())))
    assert resumed.take(100) == uninterrupted.take(100)


def test_changed_weights_hold_from_where_the_run_goes_on():
    before = mixture({"train": 9, "gsm8k": 1})
    before.take(1000)
    after = mixture({"train": 1, "gsm8k": 1})
    after.restore(before.state())
    given = Counter(item[0] for item in after.take(100))
    assert abs(given["t"] - 50) <= 1


def test_a_position_in_other_files_is_refused():
    state = mixture().state()
    with pytest.raises(ValueError, match="position is in train, gsm8k, aime, but the files are train, gsm8k now"):
        mixture({"train": 1, "gsm8k": 1}).restore(state)
    with pytest.raises(ValueError, match=r"gsm8k: the saved position is in data with 4 items, but there are 3 now"):
        Mixture({**FILES, "gsm8k": FILES["gsm8k"][1:]}, WEIGHTS, seed=3, shuffle=True).restore(state)
    with pytest.raises(ValueError, match=r"in files with data\.weights, of which there are none now"):
        Sampler(FILES["train"], seed=3, shuffle=True).restore(state)
    with pytest.raises(ValueError, match=r"position is in a run without data\.weights"):
        mixture().restore(Sampler(FILES["train"], seed=3, shuffle=True).state())


def test_files_without_weights_are_one_file_and_a_run_names_them_all_if_they_changed():
    recipe = Recipe(seed=3)
    recipe.data.train, recipe.data.more = "t.jsonl", {"gsm8k": "g.jsonl"}
    files = {name: FILES[name] for name in recipe.data.train_files}
    assert sorted(training.sampler(files, recipe, RunState()).take(14)) == sorted([*files["train"], *files["gsm8k"]])
    other = RunState(cursor={"epoch": 0, "index": 1, "num_items": 13})
    with pytest.raises(ValueError, match=r"^data\.train = t\.jsonl, g\.jsonl: .* 13 items, but there are 14 now"):
        training.sampler(files, recipe, other)
    recipe.data.weights = {"train": 1, "gsm8k": 3}
    given = Counter(item[0] for item in training.sampler(files, recipe, RunState()).take(40))
    assert given == {"t": 10, "g": 30}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.more.a=a.jsonl"], []),
        (["data.more.a=a.jsonl", "data.weights={train: 0.9, a: 0.1}"], []),
        (["data.more.a=a.jsonl", "data.weights={train: 0.9}"], ["data.weights"]),
        (["data.weights={train: 1, a: 1}"], ["data.weights.a"]),
        (["data.more.a=a.jsonl", "data.weights={train: 0, a: 1}"], ["data.weights.train"]),
        (["data.more.a=a.jsonl", "data.weights={train: .inf, a: .nan}"], ["data.weights.train", "data.weights.a"]),
        (["data.more.train=a.jsonl"], ["data.more.train"]),
        (["data.more.a/b=a.jsonl"], ["data.more.a/b"]),
        (["data.more.a=~/a.jsonl"], ["data.more.a"]),
        (["data.more.a=a.jsonl", "data.weights={train: 1, a: 1}", "data.more.a=null", "data.weights.a=null"], []),
        (["data.max_prompt_tokens=319"], []),
        (["data.max_prompt_tokens=320"], ["data.max_prompt_tokens"]),
        (["data.max_prompt_tokens=0"], ["data.max_prompt_tokens"]),
    ],
)
def test_files_and_weights_that_do_not_fit_are_refused(settings, said):
    problems = recipe_problems(RECIPES / "gspo_calculator.yaml", settings)
    assert {p.key for p in problems if p.key.startswith("data.")} == set(said)


def test_a_further_file_that_is_not_there_is_named():
    recipe = load_recipe(RECIPES / "gspo_calculator.yaml", ["data.more.a=nowhere.jsonl"]).recipe
    assert ("data.more.a", "nowhere.jsonl: no such file.") in list(file_violations(recipe, "train"))
    assert "data.more.a" not in dict(file_violations(recipe, "eval"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(path)
    return path


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def loaded(model: Path, *overrides: str, command="train") -> LoadedRecipe:
    recipe = RECIPES / ("sft.yaml" if command == "sft" else "gspo_calculator.yaml")
    return load_recipe(recipe, [f"model.path={model}", "agent.tools=[]", *overrides], command)


def asked(words: int) -> dict:
    return {"prompt": "why " * words, "label": 1}


def test_prompts_of_further_files_have_ids_of_their_own_and_the_columns_of_the_recipe(model, tmp_path):
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name / "train.jsonl", {"q": name, "a": 1}))
    settings = [f"data.train={paths[0]}", f"data.more.two={paths[1]}", "data.keys={prompt: q, label: a}"]
    task = load_task(loaded(model, *settings), train=True, evaluate=False)
    found = {name: [(p.prompt_id, p.messages[0]["content"]) for p in prompts] for name, prompts in task.train.items()}
    assert found == {"train": [("train:1", "one")], "two": [("two/train:1", "two")]}


def test_long_prompts_are_left_out_and_counted(model, tmp_path):
    tokenizer = build_tokenizer()
    system = "Be brief."

    def tokens(words: int) -> int:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked(words)["prompt"]}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    assert tokens(3) < tokens(6)
    train = write(tmp_path / "t.jsonl", asked(3), asked(6), asked(1), asked(200))
    more, heldout = write(tmp_path / "m.jsonl", asked(6), asked(2)), write(tmp_path / "h.jsonl", asked(3))
    settings = [
        *(f"data.train={train}", f"data.more.m={more}", f"data.eval={{heldout: {heldout}}}"),
        f"agent.system_prompt={system}",
    ]
    limit = tokens(3)
    task = load_task(loaded(model, *settings, f"data.max_prompt_tokens={limit}"), train=True, evaluate=True)
    kept = {name: [prompt.source.rpartition(":")[2] for prompt in prompts] for name, prompts in task.train.items()}
    assert kept == {"train": ["1", "3"], "m": ["2"]}
    assert len(task.eval_sets["heldout"]) == 1
    assert task.num_left_out == 3
    assert task.notes == [
        f"data.train: left out 2 of 4 prompts, longer than {limit} tokens",
        f"data.more.m: left out 1 of 2 prompts, longer than {limit} tokens",
        f"data.eval.heldout: left out 0 of 1 prompts, longer than {limit} tokens",
    ]
    one_less = load_task(loaded(model, *settings, f"data.max_prompt_tokens={tokens(6) - 1}"), train=True, evaluate=True)
    assert one_less.num_left_out == 3
    assert load_task(
        loaded(model, *settings, f"data.max_prompt_tokens={tokens(6)}"), train=True, evaluate=True
    ).num_left_out == 1  # fmt: skip


def test_without_a_limit_a_prompt_without_room_is_refused_and_a_limit_that_leaves_nothing_too(model, tmp_path):
    train = write(tmp_path / "t.jsonl", asked(3), asked(400))
    with pytest.raises(RecipeError, match=r"t\.jsonl:2: \d+ tokens leave no room to answer"):
        load_task(loaded(model, f"data.train={train}"), train=True, evaluate=False)
    with pytest.raises(RecipeError, match=r"data\.train: all 2 prompts are longer than data\.max_prompt_tokens 1"):
        load_task(loaded(model, f"data.train={train}", "data.max_prompt_tokens=1"), train=True, evaluate=False)


def test_supervised_training_reads_several_files(model, tmp_path):
    def said(text: str) -> dict:
        return {"chat": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}

    settings = [
        f"data.train={write(tmp_path / 'a.jsonl', said('one'), said('two'))}",
        f"data.more.b={write(tmp_path / 'b.jsonl', said('three'))}",
        "data.keys.messages=chat",
    ]
    examples = read_examples(loaded(model, *settings, command="sft"))
    assert {name: len(found) for name, found in examples.items()} == {"train": 2, "b": 1}
    write(tmp_path / "b.jsonl", said("three"), said("x " * 400))
    with pytest.raises(RecipeError, match=r"data\.more\.b: .*b\.jsonl:2: \d+ tokens, sft\.max_tokens is 320"):
        read_examples(loaded(model, *settings, command="sft"))


def test_what_is_left_out_of_a_file_takes_no_turn_from_it():
    files = {"a": [f"a{n}" for n in range(8)], "b": [f"b{n}" for n in range(4)]}
    whole, without = (Mixture(files, {"a": 2, "b": 1}, seed=3, shuffle=True) for _ in range(2))
    without.leave_out(lambda item: item in ("a5", "b2"))
    before, after = whole.take(60), without.take(30)
    assert [item[0] for item in after] == [item[0] for item in before[:30]]
    for name in files:
        order = [item for item in before if item[0] == name and item not in ("a5", "b2")]
        taken = [item for item in after if item[0] == name]
        assert taken == order[: len(taken)]
    with pytest.raises(ValueError, match="b: all 4 items are left out"):
        without.leave_out(lambda item: item[0] == "b")
