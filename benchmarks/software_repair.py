"""Episodes of software repair by scripted policies: their verdicts beside SWE-bench's own, and what they leave.

1. The tasks are made, unless `--data` has them, and every package's copy once for the sandbox.
2. So many episodes are played by the ways of repair_players.py, in a fixed mixture.
3. The processes, mounts and files that are there then must be those of before, and none when the sandbox has ended.
4. SWE-bench reads the log of each verdict. It takes a test that is skipped or said to fail as expected for one that
   passes, which slimrl does not: such tasks are `stricter`. Everything else in which the two differ is a disagreement.

The exit code is 1 if anything was left, the two disagree, an episode failed, or a policy earned what it should not.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from figures import make_table, write_figures
from left_behind import adopt_orphans, cpu_s, left, present
from repair_players import WAYS, ScriptedPlayer, Task
from rich.console import Console
from slimrl_tools.environment.check import write_data

from slimrl.agent.isolation.interpreter import call_elsewhere
from slimrl.agent.sandbox.interface import FileChange, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxConfig
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.environments.catalogue import entry_of
from slimrl.environments.play import play
from slimrl.environments.software_repair.environment import SoftwareRepair
from slimrl.environments.software_repair.grading import Grade
from slimrl.environments.software_repair.suite import statuses
from slimrl.environments.venvs import venv_python

NAME = "software_repair"
QUICK = "inflection,parse,humanize,idna,tabulate,cachetools"
"""Packages whose suite takes about a second"""
GRADING_S = 3600.0
STRICTER = ("SKIPPED", "XFAIL")
SHOWN = 10
"""Most lines of what was found that are printed"""


class Observed(SoftwareRepair):
    """Keeps the verdict's log."""

    graded: Grade

    async def _grade(self, changed: Mapping[str, FileChange]) -> Grade:
        self.graded = await super()._grade(changed)
        return self.graded


@dataclass(kw_only=True)
class Counts:
    """What came of the episodes that were played in one way."""

    episodes: int = 0
    resolved: int = 0
    suite_ran: int = 0
    stricter: int = 0
    disagreements: int = 0


@dataclass(kw_only=True)
class Played:
    """All episodes."""

    counts: dict[str, Counts] = field(default_factory=lambda: {name: Counts() for name in WAYS})
    lines: list[dict[str, object]] = field(default_factory=list)
    """Way, verdict and resolution of each whose log was written, in that order"""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0


def tasks_of(folder: Path, episodes: int, seed: int) -> Iterator[tuple[str, Task]]:
    """The way and the task of each episode."""
    prompts: Sequence[Prompt] = read_prompts(folder / "train.jsonl", {})
    rng = random.Random(seed)
    names = [name for name, way in WAYS.items() for _ in range(way.share)]
    for number in range(episodes):
        if number % len(names) == 0:
            rng.shuffle(names)
        prompt = rng.choice(prompts)
        yield names[number % len(names)], Task(prompt=prompt, base=folder / prompt.metadata["base"], seed=number)


async def play_one(pool: SandboxPool, folder: Path, name: str, task: Task, played: Played, logs: TextIO) -> None:
    way, made = WAYS[name], list[Observed]()

    def make() -> Observed:
        made.append(Observed(pool, folder=str(folder), suite_s=way.suite_s))
        return made[-1]

    player = ScriptedPlayer(way.calls(task))
    try:
        episode = await play(make, task.prompt, player, seed=task.seed, max_turns=40)
    except SandboxError as error:
        played.problems.append(f"{name}, {task.prompt.prompt_id}: {error}")
        return
    graded, count = made[0].graded, played.counts[name]
    resolved = episode.total_reward == 1
    count.episodes += 1
    count.resolved += resolved
    count.suite_ran += graded.ran
    if way.resolves not in (None, resolved):
        played.problems.append(f"{name}, {task.prompt.prompt_id}: resolved is {resolved}")
    metadata = {key: task.prompt.metadata[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    logs.write(json.dumps({"log": graded.log, **metadata}) + "\n")
    verdict = graded.verdict
    played.lines.append(
        {"way": name, "ran": graded.ran, "resolved": resolved, "repaired": verdict.repaired, "kept": verdict.kept}
    )


async def play_all(folder: Path, options: argparse.Namespace, played: Played, logs: TextIO) -> list[str]:
    """Play the episodes; returns what is left of them in the sandbox."""
    pool = SandboxPool(SandboxConfig(packages=["pytest"]))
    waiting = tasks_of(folder, options.episodes, options.seed)
    deadline = time.monotonic() + 60 * options.minutes

    async def work() -> None:
        for name, task in waiting:
            await play_one(pool, folder, name, task, played, logs)
            if (done := len(played.lines)) % 100 == 0:
                print(f"{done} episodes, {len(played.problems)} problems", file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                return

    try:
        for base in sorted((folder / "bases").iterdir()):
            await (await pool.session(folder=base)).close()
        before = await asyncio.to_thread(present)
        begun, cpu = time.monotonic(), cpu_s()
        await asyncio.gather(*(work() for _ in range(options.at_once)))
        played.seconds, played.cpu_s = time.monotonic() - begun, cpu_s() - cpu
        return await asyncio.to_thread(left, before)
    finally:
        await pool.close()


def compare(played: Played, logs: Path) -> None:
    """Count where SWE-bench's verdict on the same log is another one."""
    out = logs.with_suffix(".verdicts")
    arguments = {"logs": str(logs), "out": str(out)}
    call_elsewhere(venv_python(NAME), "swebench_grading:grade", arguments, GRADING_S)
    with logs.open() as given, out.open() as verdicts:
        for mine, text, verdict in zip(played.lines, given, verdicts, strict=True):
            line, theirs = json.loads(text), json.loads(verdict)
            count = played.counts[str(mine["way"])]
            found = statuses(line["log"])
            same = found == theirs["statuses"] and mine["resolved"] == theirs["resolved"]
            if mine["ran"]:  # of a suite that did not run to its end slimrl counts no test
                same &= mine["repaired"] == theirs["repaired"] and mine["kept"] == theirs["kept"]
            if same:
                continue
            wanted = {*line["FAIL_TO_PASS"], *line["PASS_TO_PASS"]}
            if found == theirs["statuses"] and any(found.get(test) in STRICTER for test in wanted):
                count.stricter += 1
            else:
                count.disagreements += 1
                played.problems.append(f"{mine['way']}: {mine} here, SWE-bench { {**theirs, 'statuses': ...} }")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=1000.0, help="no episode begins after so many")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=40, help="different tasks among the episodes")
    parser.add_argument("--packages", default=QUICK)
    parser.add_argument("--data", type=Path, help="folder with tasks that were made before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    adopt_orphans()
    played = Played()
    with tempfile.TemporaryDirectory(prefix="repair-benchmark-") as outer:
        folder, own = options.data or Path(outer, "data"), Path(outer, "tmp")
        if options.data is None:
            packages = {"packages": options.packages}
            write_data(entry_of(NAME), folder, num=options.tasks, heldout=1, seed=options.seed, options=packages)
        own.mkdir()
        tempfile.tempdir = str(own)  # whatever slimrl makes lies there
        before = present()
        logs = Path(outer, "logs.jsonl")
        with logs.open("w") as opened:
            leftovers = asyncio.run(play_all(folder.absolute(), options, played, opened))
        leftovers += left(before)
        compare(played, logs)
    return report(played, leftovers, options.json)


def report(played: Played, leftovers: list[str], file: Path | None) -> int:
    columns = ("policy", "episodes", "resolved", "suite ran", "stricter", "disagreements")
    episodes = len(played.lines)
    table = make_table(f"{episodes} episodes, {len(leftovers)} leftovers", columns)
    for name, count in played.counts.items():
        table.add_row(name, *(str(value) for value in vars(count).values()))
    Console(width=120).print(table)
    figures = {
        "episodes": episodes,
        "episodes_per_minute": 60 * episodes / played.seconds,
        "cpu_s_per_episode": played.cpu_s / max(1, episodes),
        "leftovers": leftovers,
        "problems": played.problems,
        "policies": {name: vars(count) for name, count in played.counts.items()},
    }
    print(f"{figures['episodes_per_minute']:.3g} episodes a minute, {figures['cpu_s_per_episode']:.3g} CPU-s each")
    for line in [*leftovers[:SHOWN], *played.problems[:SHOWN]]:
        print(line)
    write_figures(file, figures)
    return 1 if leftovers or played.problems else 0


if __name__ == "__main__":
    sys.exit(main())
