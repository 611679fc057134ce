"""`slimrl eval tournament`: games between the versions of a run, and their ratings.

1. The players: the older versions that the run kept, its export, further checkpoints, and the players of its recipe.
2. Each plays each other one, N games on the prompts of the evaluation sets, half of them with the seats swapped. Of two
   versions one is on the rollout's engines, by the name `policy`, and the other on those of older versions, `past`.
3. Who is paid more by the environment wins (`data/roles.py`); ratings are by evaluation/ratings.py.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path

from slimrl.agent.roles.player import PLAYERS
from slimrl.base.atomic import write_whole
from slimrl.base.output_file import check_output_file
from slimrl.config.problems import suggestion
from slimrl.config.schema.agent import PAST, POLICY
from slimrl.data.prompt import Prompt
from slimrl.data.roles import outcome
from slimrl.data.trajectory import Trajectory
from slimrl.evaluation.ratings import PairResult, Rating, ratings
from slimrl.evaluation.tables import print_ratings
from slimrl.models.architecture import refuse_another_model
from slimrl.observability.metrics import read_metrics
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import CHECKPOINT_NAME, RunFolder
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.task.task import load_task
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.past_versions import version_folder
from slimrl.runtime.start import logs_of_command, prepare, rollout_stage, started

EXPORT = "export"
"""Name of a run's export among the players"""
OPPONENTS = "opponents"
"""Key of a prompt's metadata by which environments of games give seats to opponents of their own"""


def tournament(
    run: Path,
    overrides: Sequence[str],
    *,
    games: int,
    others: Sequence[str],
    seats: str | None,
    anchor: str | None,
    json_file: Path | None,
    ray_address: str | None,
) -> None:
    """Play, print the ratings, and write them.

    Args:
        games: of each pair, an even number.
        others: further checkpoints, `NAME=DIR` each.
        seats: the two roles, joined by a comma; None for those of the run's trajectories.
        anchor: name of the player whose rating is 0; None for the first version.
        json_file: gets the figures; None for `tournament.json` of the run's folder.

    Raises:
        ValueError: there is nobody to play, or not two seats, or the recipe is refused.
    """
    folder = RunFolder(run)
    config = folder.resumed_config if folder.resumed_config.is_file() else folder.config
    if not config.is_file():
        raise ValueError(f"{run}: not the folder of a run, which has a config.yaml.")
    if games % 2:
        raise ValueError(f"--games {games}: an odd number cannot swap the seats evenly.")
    versions = versions_of(folder, others)
    if not versions:
        raise ValueError(f"{run}: neither older versions nor an export; name checkpoints with --checkpoint NAME=DIR.")
    first = next(iter(versions.values()))
    for text in others:
        refuse_another_model("--checkpoint", Path(text.partition("=")[2]), first)
    roles = _seats(folder, seats)
    target = json_file or run / "tournament.json"
    check_output_file("--json-file", target)
    settings = [
        f"model.path={first}",
        f"agent.past_versions.every_steps={int(len(versions) > 1)}",
    ]
    with Progress(1) as progress:
        read = partial(load_task, train=False, evaluate=True)
        loaded, task = prepare(config, [*overrides, *settings], "eval", progress, read, ray_address=ray_address)
        recipe, prompts = loaded.recipe, list(chain(*task.eval_sets.values()))
        names = [*versions, *recipe.agent.players]
        anchor = names[0] if anchor is None else anchor
        _refuse_names(names, anchor)
        _refuse_seats(roles, task.roles or _roles_played(folder), prompts)
        logs = logs_of_command(recipe.run.dir, "tournament", loaded)
        with ExitStack() as opened:
            processes = opened.enter_context(
                started(recipe, logs, progress, with_engines=True, with_past=True, ray_address=ray_address)
            )
            assert processes.engines is not None
            stage = opened.enter_context(rollout_stage(loaded, task, processes, progress))
            table = Table(versions=versions, engines=processes.engines, past=processes.past, stage=stage, seats=roles)
            pairs = {(a, b): table.play(a, b, prompts, games) for a, b in combinations(names, 2)}
        found = ratings(names, pairs, anchor, recipe.seed)
    rows = sorted(found, key=lambda rating: -rating.elo)
    totals = {name: _total(name, pairs) for name in names}
    print_ratings(rows, totals)
    write_whole(target, json.dumps(_report(rows, totals, pairs, anchor), indent=2) + "\n")
    print(f"figures: {target}")


@dataclass(kw_only=True)
class Table:
    """Where two play: the engines, and which versions they have."""

    versions: Mapping[str, Path]
    engines: EngineGroup
    past: EngineGroup | None
    stage: RolloutStage
    seats: tuple[str, str]
    _loaded: dict[str, str] = field(default_factory=dict)
    """Version on the engines of `policy` and of `past`"""

    def play(self, a: str, b: str, prompts: Sequence[Prompt], games: int) -> PairResult:
        """The games of a pair. Raises ValueError: one of the seats was never asked."""
        who = self._sit_down(a, b)
        planned, seat_of = {}, {}
        for number in range(games):
            first, second = self.seats if number % 2 == 0 else self.seats[::-1]
            prompt = prompts[number // 2 % len(prompts)]
            name = f"tournament/{a} {b}/{number:05d}"
            players = {PLAYERS: {first: who[a], second: who[b]}}
            planned[name] = replace(prompt, metadata={**prompt.metadata, **players})
            seat_of[name] = first
        trajectories = self.stage.play(f"{a} against {b}", planned)
        self._refuse_empty_seat(trajectories)
        result = PairResult()
        for trajectory in trajectories:
            own = seat_of[trajectory.trajectory_id]
            [other] = [seat for seat in self.seats if seat != own]
            if (points := outcome(trajectory, [own], [other])) is not None:
                result.count(points)
        return result

    def _sit_down(self, a: str, b: str) -> dict[str, str]:
        """Load the versions of a pair; returns the name by which each of the two is a player."""
        who, free = {}, iter([(POLICY, self.engines), (PAST, self.past)])
        for name in (a, b):
            if name not in self.versions:
                who[name] = name
                continue
            who[name], group = next(free)
            assert group is not None
            if self._loaded.get(who[name]) != name:
                group.load_checkpoint(self.versions[name], list(self.versions).index(name))
                self._loaded[who[name]] = name
        return who

    def _refuse_empty_seat(self, trajectories: Sequence[Trajectory]) -> None:
        asked = {role for trajectory in trajectories for role in trajectory.metadata.get("roles", {})}
        if missing := [seat for seat in self.seats if seat not in asked]:
            said = f"the environment asked {', '.join(sorted(asked)) or 'no role'}"
            raise ValueError(
                f"{missing[0]} played in none of {len(trajectories)} games: {said}. Give prompts in which nobody else "
                "has the seat (data.eval.NAME=FILE), or other --seats."
            )


def versions_of(folder: RunFolder, others: Sequence[str]) -> dict[str, Path]:
    """Hugging Face checkpoints by the names of the players that they are, the oldest version first, the export last
    unless it is one of them.

    Args:
        others: `NAME=DIR` each.

    Raises:
        ValueError: one of them is none, or has the name of another.
    """
    found = {path.name: path for path in sorted(_older(folder.past_versions))}
    last = max((line["step"] for line in read_metrics(folder.metrics)), default=0) if folder.metrics.is_file() else 0
    if folder.export.is_dir() and version_folder(folder.past_versions, last) not in found.values():
        found[EXPORT] = folder.export
    for text in others:
        name, separator, path = text.partition("=")
        if not separator or not name or not (Path(path) / "config.json").is_file():
            raise ValueError(f"--checkpoint {text}: write NAME=DIR, with a Hugging Face checkpoint folder.")
        if name in found:
            raise ValueError(f"--checkpoint {text}: another player has this name.")
        found[name] = Path(path)
    return found


def _older(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*") if CHECKPOINT_NAME.fullmatch(path.name))


def _seats(folder: RunFolder, given: str | None) -> tuple[str, str]:
    roles = _roles_played(folder) if given is None else [role.strip() for role in given.split(",")]
    if len(roles) != 2 or roles[0] == roles[1]:
        said = f"{folder.trajectories}" if given is None else f"--seats {given}"
        raise ValueError(
            f"{said}: {len(set(roles))} roles ({', '.join(roles)}), and a game has two seats. Give --seats A,B."
        )
    return roles[0], roles[1]


def _roles_played(folder: RunFolder) -> list[str]:
    """The roles of the trajectories that a run wrote, sorted."""
    lines = (line for path in sorted(folder.trajectories.glob("step_*.jsonl")) for line in path.open())
    return sorted({role for line in lines for role in json.loads(line)["metadata"].get("roles", {})})


def _refuse_seats(seats: tuple[str, str], known: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """
    Args:
        known: the roles of the environment; empty if nothing says them.

    Raises:
        ValueError: a seat is none of them, or has an opponent of the environment's own in a prompt.
    """
    if known and (unknown := [seat for seat in seats if seat not in known]):
        meant = suggestion(unknown[0], known)
        raise ValueError(f"--seats: there is no role {unknown[0]}; roles are {', '.join(known)}.{meant}")
    for prompt in prompts:
        named = prompt.metadata.get(OPPONENTS)
        if isinstance(named, dict) and (taken := [seat for seat in seats if seat in named]):
            raise ValueError(
                f"{prompt.source}: metadata.{OPPONENTS} gives the seat {taken[0]} to {named[taken[0]]}, so that the "
                "players cannot have it. Give prompts in which nobody else has a seat, with data.eval.NAME=FILE."
            )


def _refuse_names(names: Sequence[str], anchor: str) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"two players have the same name: {', '.join(names)}")
    if len(names) < 2:
        raise ValueError(f"{names[0]} is the only player; name checkpoints with --checkpoint NAME=DIR.")
    if anchor not in names:
        raise ValueError(f"--anchor {anchor}: the players are {', '.join(names)}.")


def _total(name: str, pairs: Mapping[tuple[str, str], PairResult]) -> PairResult:
    """All games of a player."""
    total = PairResult()
    for (a, b), result in pairs.items():
        if name in (a, b):
            total.draws += result.draws
            total.wins += result.wins if name == a else result.losses
            total.losses += result.losses if name == a else result.wins
    return total


def _report(
    rows: Sequence[Rating],
    totals: Mapping[str, PairResult],
    pairs: Mapping[tuple[str, str], PairResult],
    anchor: str,
) -> dict[str, object]:
    return {
        "anchor": anchor,
        "players": [{**asdict(row), **asdict(totals[row.name])} for row in rows],
        "pairs": [{"a": a, "b": b, **asdict(result)} for (a, b), result in pairs.items()],
    }
