"""A model by its id on the Hugging Face Hub: from a local cache, and without one and a network."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from fake_hub import COMMIT
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.config import hub
from slimrl.config.check import file_violations
from slimrl.config.hub import HubModel, cached, fetch, fetch_to_this_node, hub_model
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.engines.servers.process import ServerError
from slimrl.models.hf_config import config_for_planning, published_config
from slimrl.models.offline_recipe import read_offline
from slimrl.observability.progress import Progress
from slimrl.runtime.checks.fetched_model import fetch_model, with_cached_model
from slimrl.runtime.checks.preview import preview
from slimrl.runtime.cluster import engine_actor, trainer_actor

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = RECIPES / "qwen3_moe" / "qwen3_30b_a3b_gspo_math.yaml"
MODEL = "Qwen/Qwen3-30B-A3B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a process without a network."""
    path = tmp_path / "home" / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return path


def put(cache: Path, model_id: str, files: dict[str, str]) -> Path:
    """The folder of a model in a cache as huggingface_hub lays it out."""
    model = cache / f"models--{model_id.replace('/', '--')}"
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    (model / "blobs").mkdir()
    for number, (name, text) in enumerate(files.items()):
        (model / "blobs" / str(number)).write_text(text)
        (folder / name).symlink_to(model / "blobs" / str(number))
    return folder


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        (MODEL, True),
        ("org/name.v1_2-x", True),
        ("models/Qwen3-30B-A3B", False),
        ("Qwen3-30B-A3B", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./a", False),
        ("../b", False),
        ("here/it", False),
        ("here/typo", False),
        ("/cache/models--a--b/snapshots/abc", True),
    ],
)
def test_an_id_has_one_slash_and_is_no_folder(tmp_path, monkeypatch, path, is_id):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "it").mkdir(parents=True)
    assert (hub_model(path) is not None) is is_id


def test_a_folder_of_a_cache_is_its_commit_wherever_it_is_missing(tmp_path):
    path = tmp_path / "x" / "models--org--my-model" / "snapshots" / COMMIT
    assert hub_model(str(path)) == HubModel(model_id="org/my-model", revision=COMMIT, cache=tmp_path / "x")
    path.mkdir(parents=True)
    assert hub_model(str(path)) is None


def test_a_model_of_the_cache_needs_no_network(cache):
    config = published_config("Qwen3-30B-A3B")
    folder = put(cache, MODEL, {"config.json": json.dumps(config), "model.safetensors": ""})
    assert fetch(HubModel(model_id=MODEL)) == cached(HubModel(model_id=MODEL)) == folder
    loaded = load_recipe(LARGE)
    assert with_cached_model(loaded).recipe.model.path == str(folder)
    assert with_cached_model(loaded).where("model.path") == f"{LARGE}:11"
    assert "model.path" not in dict(file_violations(loaded.recipe, "train"))


def test_the_fetched_model_is_the_recipe_s_from_then_on(cache, tmp_path):
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "q", "label": 1}\n')
    files = [f"data.train={data}", "data.more.deepscaler=null", "data.weights={train: 1, deepscaler: null}",
             f"data.eval={{aime_2024: {data}, aime_2025: {data}}}"]  # fmt: skip
    config = published_config("Qwen3-30B-A3B")
    folder = put(cache, MODEL, {"config.json": json.dumps(config), "model.safetensors": ""})
    with Progress(0) as progress:
        assert fetch_model(load_recipe(LARGE, files), [], progress).recipe.model.path == str(folder)
        plain = load_recipe(LARGE, ["model.path=models/x"])
        assert fetch_model(plain, [], progress) is plain


def test_weights_are_not_fetched_for_a_recipe_with_problems(cache, monkeypatch):
    put(cache, MODEL, {"config.json": json.dumps(published_config("Qwen3-30B-A3B"))})
    asked = []
    snapshot = hub._snapshot

    def noted(model, files, **how):
        asked.append(files)
        return snapshot(model, files, **how)

    monkeypatch.setattr(hub, "_snapshot", noted)
    loaded = load_recipe(LARGE, ["trainer.parallel.expert=3", "data.train=nowhere.jsonl"])
    with Progress(0) as progress, pytest.raises(RecipeError) as caught:
        fetch_model(loaded, [], progress)
    assert {"trainer.parallel.expert", "data.train"} <= {problem.key for problem in caught.value.problems}
    assert asked == [hub.CONFIG_FILES]


def test_without_network_and_cache_the_setting_the_id_and_what_to_do_are_said_once(cache):
    with Progress(0) as progress, pytest.raises(RecipeError) as caught:
        fetch_model(load_recipe(LARGE), [], progress)
    (problem,) = caught.value.problems
    assert str(problem) == (
        f"{LARGE}:11: model.path: {MODEL}: no such folder, not whole in the cache {cache}, and the Hugging Face Hub "
        f"cannot be reached (OfflineModeIsEnabled). Run `hf download {MODEL}` where there is a network and set HF_HOME "
        "to where that put it, or set model.path to a folder."
    )


def test_an_id_is_planned_by_its_published_name_or_by_its_config_in_the_cache(cache):
    assert read_offline(LARGE, [], "train").model == f"Qwen3-30B-A3B as published, in bfloat16, for {MODEL} is not here"
    with pytest.raises(RecipeError, match=r"model\.path: .*not whole in the cache.* Run `hf download Qwen/"):
        read_offline(LARGE, [], "train", files=True)
    with pytest.raises(ValueError, match="none of the published models"):
        config_for_planning(Path("org/mine"))
    config = {**published_config("Qwen3-30B-A3B"), "num_hidden_layers": 2}
    put(cache, "org/mine", {"config.json": json.dumps(config)})
    assert config_for_planning(Path("org/mine")) == (config, "org/mine in the cache of the Hugging Face Hub")


async def test_a_conversation_is_shown_with_the_tokenizer_of_a_model_without_weights(cache, tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "toy")
    put(cache, "org/toy", {file.name: file.read_text() for file in (tmp_path / "toy").iterdir()})
    loaded = load_recipe(RECIPES / "tiny_moe" / "gspo_calculator.yaml", ["model.path=org/toy", "agent.tools=[]"])
    assert (await preview(loaded)).segments


def test_an_engine_and_a_trainer_rank_fetch_their_model_before_they_start(monkeypatch, tmp_path):
    order = []

    def started(*_, **__):
        order.append("started")
        raise ServerError("no further")

    for module in (engine_actor, trainer_actor):
        monkeypatch.setattr(module, "fetch_to_this_node", order.append)
    monkeypatch.setattr(engine_actor, "EngineServer", started)
    monkeypatch.setitem(sys.modules, "slimrl.trainer.worker", SimpleNamespace(TrainerWorker=started))
    actor = SimpleNamespace(
        recipe=load_recipe(LARGE).recipe, starts=0, logs=tmp_path, index=0, part=0, role="engine", rank=0,
        total_updates=1, is_critic=False, _key=None, node=SimpleNamespace(address="127.0.0.1"),
    )  # fmt: skip
    for kind, method, how in (
        (engine_actor.EngineActor, "_start", {"port": None, "meeting": None}),
        (trainer_actor.TrainerActor, "start", {"meeting": "tcp://127.0.0.1:1"}),
    ):
        with pytest.raises(ServerError):
            getattr(kind, method)(actor, **how)
    assert order == [MODEL, "started"] * 2


def test_a_plain_folder_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_snapshot", lambda *_, **__: pytest.fail("it asks the Hub"))
    fetch_to_this_node(str(tmp_path))
    fetch_to_this_node("models/Qwen3-4B")


def test_a_path_that_the_hub_would_never_take_is_a_folder_that_is_missing():
    for path in ("runs2/a--b", "a/b..c", "a/b.git", "a/b.", f"a/{'b' * 100}"):
        assert hub.hub_model(path) is None


def test_a_snapshot_of_single_files_is_not_a_whole_model(tmp_path):
    """As other programs leave it that read a tokenizer alone."""
    commit = "0" * 40
    folder = tmp_path / "models--o--m" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    model = hub.HubModel(model_id="o/m", revision=commit, cache=tmp_path)
    assert hub.cached(model) is None
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}')
    (folder / "1.safetensors").write_text("")
    assert hub.cached(model) is None
    (folder / "2.safetensors").write_text("")
    assert hub.cached(model) == folder
