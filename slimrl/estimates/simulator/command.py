"""`slimrl simulate`: compares modes, numbers of GPUs or splits of a recipe."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from slimrl.base.output_file import check_output_file
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.simulator.cluster import Cluster, planned_cluster, read_train_recipe
from slimrl.estimates.simulator.distribution import read_distribution
from slimrl.estimates.simulator.schedule import SYNC, Schedule, all_schedules, recorded_schedules, schedule_of
from slimrl.estimates.simulator.simulation import Simulation
from slimrl.estimates.simulator.splits import best_splits, legal_splits, scaled_split, shared_overrides, split_overrides
from slimrl.estimates.simulator.tables import PIPED_COLUMNS, Row, print_rows
from slimrl.estimates.simulator.trace import read_trace
from slimrl.estimates.simulator.workload import DrawnWorkload, Workload, drawn_workload
from slimrl.models.offline_recipe import OfflineRecipe
from slimrl.observability.terminal import plain_console

SHOWN_SPLITS = 8


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options of `slimrl simulate`."""

    turns: str | None = None
    turn_tokens: str | None = None
    tool: str | None = None
    prompt_tokens: int | None = None
    decode_efficiency: float = 0.6
    gpus: str | None = None
    scale_batch: bool = False
    suggest: int | None = None
    trace: Path | None = None
    steps: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what is impossible, and for options that do not go together."""
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: must be at least 1")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed}: must be at least 0")
        if not 0 < self.decode_efficiency <= 1:
            raise ValueError(f"--decode-efficiency {self.decode_efficiency}: must be above 0 and at most 1")
        if self.scale_batch and self.gpus is None:
            raise ValueError("--scale-batch goes with --gpus.")
        if self.gpus is not None and self.suggest is not None:
            raise ValueError("--gpus and --suggest exclude each other.")
        planned = ("turns", "turn_tokens", "tool", "prompt_tokens", "gpus", "suggest")
        given = [f"--{name.replace('_', '-')}" for name in planned if getattr(self, name) is not None]
        if self.trace is not None and given:
            raise ValueError(f"{' and '.join(given)} cannot go with --trace, which has the times of one cluster.")

    @property
    def sizes(self) -> list[int]:
        """Raises ValueError if `gpus` is no list of numbers."""
        if self.gpus is None:
            return []
        parts = self.gpus.split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"--gpus {self.gpus}: must be numbers of GPUs with commas between them, such as 8,64")
        return [int(part) for part in parts]


class Simulator:
    """Plans clusters for one recipe and simulates them."""

    def __init__(self, path: Path, overrides: Sequence[str], hardware: Hardware, question: Question) -> None:
        """
        Raises:
            ValueError: the recipe or an option is refused.
        """
        self._path, self._overrides, self._hardware, self._question = path, overrides, hardware, question
        self.planned = read_train_recipe(path, overrides, model_needed=question.trace is None)
        self.recipe = self.planned.recipe
        self.notes: list[str] = []
        if (oversample := self.recipe.rollout.oversample) > 1:
            self.notes.append(
                f"rollout.oversample {oversample:g} (partial rollouts) is not modelled: in `sync` a step waits for all "
                "trajectories that begin in it"
            )
        if self.recipe.shares_devices and question.trace is None:
            raise ValueError(f"{path}: {_why_shared(self.recipe)}; the row `sync, shared` has all GPUs in turns.")

    def rows_by_mode(self) -> list[Row]:
        """All modes of the recipe, on its own GPUs or those of --gpus."""
        question = self._question
        if question.trace is not None:
            return self._trace_rows(question.trace)
        splits = [scaled_split(self.recipe, size, scale_batch=question.scale_batch) for size in question.sizes]
        rows: list[Row] = []
        for split in splits or [[]]:
            planned = self._read(split)
            rows += self._rows(planned, all_schedules(self.recipe.rollout.too_old))
            rows += self._shared_rows(planned, split)
        return rows

    def _trace_rows(self, trace: Path) -> list[Row]:
        """All modes and the recorded run's own."""
        rollout = self.recipe.rollout
        cluster, recorded, notes = read_trace(trace, self.recipe)
        self.notes += [
            *notes,
            "the times are those of the run, under the load that it had. Other modes than its own load their devices "
            "otherwise, above all where trainer and engines share them, so their rows are a rough guide",
        ]
        schedules, own = recorded_schedules(rollout)
        if own is None:
            self.notes.append(
                f"with rollout.oversample {rollout.oversample:g} the times of trajectories that went on after a step "
                "have its training and resync in them, and no row is the run's"
            )
        rows = [self._simulate(cluster, recorded, schedule, rollout.prompts_per_step, inf) for schedule in schedules]
        return [replace(row, own=row.schedule == own) for row in rows]

    def rows_by_split(self) -> list[Row]:
        """The best splits of --suggest in the recipe's own mode."""
        assert self._question.suggest is not None

        def measure(ranks: int, engines: int) -> Row:
            [row] = self._rows(self._read(split_overrides(ranks, engines)), [schedule_of(self.recipe.rollout)])
            return row

        splits = legal_splits(self.recipe, self._question.suggest)
        return best_splits(splits, measure, _worth)[:SHOWN_SPLITS]

    def _read(self, more: Sequence[str]) -> OfflineRecipe:
        return read_train_recipe(self._path, [*self._overrides, *more]) if more else self.planned

    def _rows(self, planned: OfflineRecipe, schedules: Sequence[Schedule], *, shared: bool = False) -> list[Row]:
        rollout = planned.recipe.rollout
        workload = self._workload(planned)
        cluster, problems = planned_cluster(
            planned,
            self._hardware,
            lengths=workload.lengths(),
            decode_efficiency=self._question.decode_efficiency,
        )
        rows = [
            self._simulate(cluster, workload, schedule, rollout.prompts_per_step, rollout.trajectory_timeout_s)
            for schedule in schedules
        ]
        return [replace(row, shared=shared, problems=problems) for row in rows]

    def _shared_rows(self, planned: OfflineRecipe, split: Sequence[str]) -> list[Row]:
        """`sync` on the same number of GPUs, all of which train and generate in turns."""
        recipe = planned.recipe
        gpus = recipe.trainer.num_ranks + recipe.rollout.num_engines * recipe.rollout.engine_tp
        try:
            shared = self._read([*split, *shared_overrides(recipe, gpus)])
        except RecipeError as error:
            self.notes.append(f"{gpus} GPUs shared by trainer and engines are left out: {error.problems[0].message}")
            return []
        return self._rows(shared, [SYNC], shared=True)

    def _workload(self, planned: OfflineRecipe) -> DrawnWorkload:
        question = self._question
        # A trajectory has a turn, and a turn a token.
        least = {"turns": 1.0, "turn_tokens": 1.0, "tool": 0.0}
        turns, turn_tokens, tool_s = (
            None
            if (text := getattr(question, name)) is None
            else read_distribution(f"--{name.replace('_', '-')}", text, least=number)
            for name, number in least.items()
        )
        return drawn_workload(
            planned.recipe.rollout,
            turns=turns,
            turn_tokens=turn_tokens,
            tool_s=tool_s,
            prompt_tokens=question.prompt_tokens,
            seed=question.seed,
        )

    def _simulate(
        self,
        cluster: Cluster,
        workload: Workload,
        schedule: Schedule,
        batch: int,
        deadline_s: float,
    ) -> Row:
        warm_up = 2 + 2 * schedule.max_staleness
        simulation = Simulation(
            cluster,
            workload,
            schedule,
            batch=batch,
            steps=self._question.steps,
            warm_up=warm_up,
            deadline_s=deadline_s,
        )
        return Row(cluster=cluster, schedule=schedule, outcome=simulation.run())


def _why_shared(recipe: Recipe) -> str:
    if recipe.rollout.colocated:
        return (
            "rollout.colocated lets the engines share the trainer's GPUs, and only sync works so. To compare modes, "
            "give rollout.colocated=false resync.transport=p2p"
        )
    return (
        "resync.transport ipc puts the engines on the trainer's GPUs, and how fast both are there at the same time is "
        "not simulated. To compare modes, give resync.transport=p2p"
    )


def _worth(row: Row) -> tuple[bool, float]:
    """What fits is better than what does not."""
    return not row.problems, row.outcome.trajectories_per_s


def run(
    path: Path, overrides: Sequence[str], hardware: Hardware, question: Question, *, json_file: Path | None
) -> None:
    """Print the table, and write its rows to the file if there is one.

    Raises:
        ValueError: the recipe or an option is refused, or the file cannot be written.
    """
    simulator = Simulator(path, overrides, hardware, question)
    if json_file is not None:
        check_output_file("--json-file", json_file)
    rollout = simulator.recipe.rollout
    if question.suggest is not None:
        rows = simulator.rows_by_split()
        title = f"splits of {question.suggest} GPUs in mode {schedule_of(rollout).name}, the best first"
    else:
        rows = simulator.rows_by_mode()
        title = f"{rollout.prompts_per_step} groups of {rollout.samples_per_prompt} a step, {question.steps} steps"
    print_rows(title, rows)
    notes = [
        *simulator.notes,
        *dict.fromkeys(f"{row.split} GPUs do not fit: {why}" for row in rows for why in row.problems),
    ]
    if question.trace is None:
        notes.append(
            f"the times are planned for GPUs of {hardware.peak_tflops:g} TFLOPS and "
            f"{hardware.links.memory_gb_per_s:g} GB/s, not measured; --trace RUN has those of a run"
        )
    if question.trace is None and question.turn_tokens is None:
        notes.append("all turns sample the most tokens that the recipe allows; --turn-tokens sets their distribution")
    console = plain_console(stderr=True, piped_columns=PIPED_COLUMNS)
    for note in notes:
        console.print(f"note: {note}")
    if json_file is not None:
        written = {
            "recipe": str(path),
            "overrides": list(overrides),
            "question": {
                name: str(value) if isinstance(value, Path) else value for name, value in asdict(question).items()
            },
            "rows": [row.as_json() for row in rows],
            "notes": notes,
        }
        json_file.write_text(json.dumps(written, indent=2) + "\n")
