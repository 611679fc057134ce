"""`slimrl eval tournament`: who plays whom, on which engines, and what is written; no engine runs."""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl.config.schema.agent import PlayerConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.runtime import tournament as command
from slimrl.runtime.tournament import tournament

PROMPTS = [Prompt(prompt_id=str(n), messages=[], label=None, metadata={"game": "g", "n": n}) for n in range(3)]
STRENGTH = {"step_000000": 0, "step_000010": 2, "export": 3, "bot": 1}


class Parts:
    """Engines and stage at once. Whoever is stronger wins, but for the seat `white` that draws between neighbours."""

    def __init__(self) -> None:
        self.recipe = Recipe()
        self.recipe.agent.players = {"bot": PlayerConfig(function="a:b")}
        self.prompts, self.roles = PROMPTS, ()
        self.started: dict = {}
        self.prepared: tuple = ()
        self.on: dict[str, str] = {}
        self.loads: list[tuple[str, str]] = []
        self.seats = ("black", "white")
        self.games: list[tuple[str, str, int]] = []

    def group(self, name: str) -> SimpleNamespace:
        def load(folder: Path, version: int) -> None:
            self.on[name] = "export" if folder.name == "hf" else folder.name
            self.loads.append((name, self.on[name]))

        return SimpleNamespace(load_checkpoint=load)

    def play(self, name: str, planned: dict[str, Prompt]) -> list[Trajectory]:
        return [self._played(one, prompt) for one, prompt in planned.items()]

    def _played(self, name: str, prompt: Prompt) -> Trajectory:
        named = prompt.metadata["players"]
        who = {seat: self.on.get(player, player) for seat, player in named.items()}
        self.games.append((who["black"], who["white"], prompt.metadata["n"]))
        gap = STRENGTH[who["black"]] - STRENGTH[who["white"]]
        paid = {} if gap == -1 else {"black": float(gap), "white": float(-gap)}
        failed = who == {"black": "bot", "white": "step_000000"} and prompt.metadata["n"] == 0
        return Trajectory(
            group_id="g", trajectory_id=name, segments=[], status=Status.failed if failed else Status.completed,
            metadata={"roles": {seat: {} for seat in self.seats}, "environment": {"role_rewards": paid}},
        )  # fmt: skip


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    made = Parts()

    def prepare(path, overrides, name, progress, read, **more):
        made.prepared = (path.name, list(overrides), name)
        sets = {"a": made.prompts[:2], "b": made.prompts[2:]}
        return SimpleNamespace(recipe=made.recipe), SimpleNamespace(eval_sets=sets, roles=made.roles)

    @contextmanager
    def started(recipe, folder, progress, **how):
        made.started = how
        yield SimpleNamespace(engines=made.group("policy"), past=made.group("past"))

    @contextmanager
    def rollout_stage(loaded, task, processes, progress):
        yield made

    for name, value in {"prepare": prepare, "started": started, "rollout_stage": rollout_stage}.items():
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(command, "logs_of_command", lambda *_: "logs")
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for path in ("past_versions/step_000000", "past_versions/step_000010", "export/hf", "trajectories"):
        (folder / path).mkdir(parents=True)
    write_config(folder / "past_versions" / "step_000000")
    (folder / "config.yaml").write_text("")
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 12}\n')
    roles = {"metadata": {"roles": {"white": {}, "black": {}}}}
    (folder / "trajectories" / "step_000001.jsonl").write_text(json.dumps(roles) + "\n")
    # A run has its recorded trajectories and its images there too.
    (folder / "trajectories" / "step_000001.parquet").write_bytes(b"PAR1\xff")
    (folder / "trajectories" / "step_000002").mkdir()
    return folder


def write_config(folder: Path, **size: int) -> None:
    (folder / "config.json").write_text(json.dumps({**toy_config("qwen3_moe", ToySize(**size)), "vocab_size": 512}))


def play(run: Path, **given) -> dict:
    how = {"games": 6, "others": [], "seats": None, "anchor": None, "json_file": None, "ray_address": None}
    tournament(run, ["a=1"], **{**how, **given})
    return json.loads((run / "tournament.json").read_text())


def test_each_plays_each_with_the_seats_swapped_on_every_prompt(parts: Parts, run: Path, capsys):
    report = play(run)
    first = run / "past_versions" / "step_000000"
    assert parts.prepared == (
        "config.yaml", ["a=1", f"model.path={first}", "agent.past_versions.every_steps=1"], "eval",
    )  # fmt: skip
    assert parts.started == {"with_engines": True, "with_past": True, "ray_address": None}
    pairs = Counter((frozenset(game[:2]), game[2]) for game in parts.games)
    assert len({pair for pair, _ in pairs}) == 6
    assert set(pairs.values()) == {2}
    assert len(set(parts.games)) == 36
    # A version stays where it is as long as it plays there.
    assert parts.loads == [
        ("policy", "step_000000"), ("past", "step_000010"), ("past", "export"),
        ("policy", "step_000010"), ("policy", "export"),
    ]  # fmt: skip
    results = {(pair["a"], pair["b"]): (pair["wins"], pair["draws"], pair["losses"]) for pair in report["pairs"]}
    assert results["step_000000", "step_000010"] == (0, 0, 6)
    # Neighbours draw where the weaker one has black; one such game failed.
    assert results["step_000010", "export"] == (0, 3, 3)
    assert results["step_000000", "bot"] == (0, 3, 2)
    assert results["step_000010", "bot"] == (3, 3, 0)
    assert [player["name"] for player in report["players"]] == ["export", "step_000010", "bot", "step_000000"]
    best = report["players"][0]
    assert (best["wins"], best["draws"], best["losses"]) == (15, 3, 0)
    assert (report["anchor"], report["players"][-1]["elo"]) == ("step_000000", 0.0)
    assert "export" in capsys.readouterr().out


def test_an_anchor_and_further_checkpoints_can_be_named_and_an_export_of_a_kept_version_plays_once(
    parts: Parts, run: Path, tmp_path: Path, monkeypatch
):
    other = tmp_path / "other"
    other.mkdir()
    write_config(other)
    (run / "metrics.jsonl").write_text('{"step": 10}\n')
    monkeypatch.setitem(STRENGTH, "other", 5)
    report = play(run, others=[f"mine={other}"], anchor="bot")
    assert {player["name"] for player in report["players"]} == {"step_000000", "step_000010", "mine", "bot"}
    assert {player["name"]: player["elo"] for player in report["players"]}["bot"] == 0
    for given, said in {
        f"export2={tmp_path / 'none'}": "write NAME=DIR, with a Hugging Face checkpoint",
        f"step_000010={other}": "another player has this name",
        f"bot={other}": "two players have the same name",
    }.items():
        with pytest.raises(ValueError, match=said):
            play(run, others=[given])
    write_config(other, layers=3)
    with pytest.raises(
        ValueError, match=r"--checkpoint .*other: another model than .*num_layers is 3 there and 4 here"
    ):
        play(run, others=[f"mine={other}"])


def test_what_cannot_be_played_is_refused(parts: Parts, run: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="an odd number cannot swap"):
        play(run, games=7)
    with pytest.raises(ValueError, match="not the folder of a run"):
        play(tmp_path)
    with pytest.raises(ValueError, match="--anchor step_000001: the players are step_000000, step_000010, export, bot"):
        play(run, anchor="step_000001")
    with pytest.raises(ValueError, match=r"--seats a,b,c: 3 roles \(a, b, c\), and a game has two seats"):
        play(run, seats="a,b,c")
    with pytest.raises(ValueError, match=r"--seats white,white: 1 roles"):
        play(run, seats="white,white")
    assert not parts.started
    parts.seats = ("white",)
    with pytest.raises(ValueError, match="black played in none of 6 games: the environment asked white"):
        play(run)
    (run / "trajectories" / "step_000001.jsonl").unlink()
    with pytest.raises(ValueError, match=r"trajectories: 0 roles .* Give --seats A,B"):
        play(run)


def test_seats_that_nobody_can_take_are_refused_before_anything_starts(parts: Parts, run: Path):
    with pytest.raises(
        ValueError, match=r"--seats: there is no role whit; roles are black, white. Did you mean white\?"
    ):
        play(run, seats="black,whit")
    # What the environment's class says comes before what was played.
    parts.roles = ("black", "white", "judge")
    with pytest.raises(ValueError, match="--seats: there is no role left; roles are black, white, judge"):
        play(run, seats="left,black")
    taken = Prompt(
        prompt_id="t", messages=[], label=None, metadata={"opponents": {"white": "optimal"}}, source="games.jsonl:4"
    )
    parts.prompts = [*PROMPTS, taken]
    with pytest.raises(
        ValueError, match=r"games.jsonl:4: metadata.opponents gives the seat white to optimal.*NAME=FILE"
    ):
        play(run)
    assert not parts.started
