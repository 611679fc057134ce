"""The legs of a session, one after the other, with the faults that happen to each."""

import os
import random
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from chaos_clock import Clock
from chaos_judge import SHARED_MEMORY_DIR, differences, ledger_of, remove_left_files, steps_in_order
from chaos_kinds import KINDS
from chaos_legs import LEGS, Leg, prepare
from chaos_run import BACK_S, START_S, Broken, ChaosRun
from chaos_services import Service
from chaos_table import Record, Verdict
from cli_runs import succeed

from slimrl.observability.run_folder import RunFolder

RESTARTED = re.compile("the trainer has started again .* goes on after step (\\d+)")
WHOLE_S = 3600.0
"""Deadline of the run to which nothing happens."""
MORE_STEPS = 2
"""Steps of a deterministic run after its last fault"""
MAX_PROBLEM = 900
"""Most characters of an error that nobody expected"""


Keep = Callable[[list[Record], list[Verdict]], object]


def session(options: Namespace, keep: Keep) -> tuple[list[Record], list[Verdict]]:
    """What the command line asks for: see chaos.py.

    Args:
        keep: gets what there is so far, after every fault.
    """
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    search_path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    start = prepare(folder, options.sft_updates)
    legs = [leg for leg in LEGS if not options.mode or leg.mode in options.mode]
    legs = [leg for leg in legs if not options.leg or leg.name in options.leg]
    kinds = {leg: kinds_of(leg, options.kind) for leg in legs}
    legs = [leg for leg in legs if kinds[leg]]
    if not legs:
        raise SystemExit(f"No leg has these kinds. There are: {', '.join(KINDS)}")
    total = options.faults or sum(map(len, kinds.values()))
    rng, records, verdicts = random.Random(options.seed), list[Record](), list[Verdict]()

    def keep_all() -> None:
        keep(records, verdicts)

    for leg, count in zip(legs, shares([len(kinds[leg]) for leg in legs], total), strict=True):
        if count:
            played = LegSession(leg, folder, start, random.Random(rng.random()), records, keep_all)
            verdicts.append(played.play(kinds[leg], count, options.minutes * count / total))
            keep_all()
    return records, verdicts


def kinds_of(leg: Leg, asked: list[str] | None) -> list[str]:
    return [name for name, kind in KINDS.items() if kind.suits(leg) and (not asked or name in asked)]


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Whole numbers that add up to the total, as close to these proportions as that allows."""
    given: list[int] = []
    for number, size in enumerate(sizes):
        given.append(round((total - sum(given)) * size / sum(sizes[number:])))
    return given


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """What fails in the block is a problem, and no end of the session."""
    try:
        yield
    except Broken as error:
        problems.append(str(error))
    except Exception as error:  # noqa: BLE001 - a fault may break anything that is asked after it
        problems.append(repr(error)[:MAX_PROBLEM])


class LegSession:
    """A leg, from its start to its verdict."""

    def __init__(
        self, leg: Leg, folder: Path, start: Path, rng: random.Random, records: list[Record], keep: Callable[[], object]
    ) -> None:
        """
        Args:
            records: gets the faults of the leg.
            keep: called after each.
        """
        self._leg, self._rng, self._records, self._keep = leg, rng, records, keep
        self._folder, self._start = folder, start

    def play(self, kinds: list[str], count: int, minutes: float) -> Verdict:
        """So many faults of these kinds, in so many minutes or as long as it takes; the verdict has what failed."""
        order = self._rng.sample(kinds, len(kinds))
        planned = [order[number % len(order)] for number in range(count)]
        self._rng.shuffle(planned)
        times_s = sorted(self._rng.uniform(0, 60 * minutes) for _ in planned)
        faults = list(zip(times_s, planned, strict=True))
        verdict = Verdict(leg=self._leg.name, mode=self._leg.mode)
        # Short, since sockets lie in it; what is left there is a problem.
        with temporary_folder("sc-") as temporary, temporary_folder("sc-clock-") as library:
            os.environ["TMPDIR"] = str(temporary)
            with noted(verdict.problems):
                self._play(faults, minutes, verdict, library)
            with noted(verdict.problems):
                verdict.problems += [f"left: {path}" for path in remove_left_files(SHARED_MEMORY_DIR, temporary)]
        return verdict

    def _play(self, faults: list[tuple[float, str]], minutes: float, verdict: Verdict, library: Path) -> None:
        data = self._folder / "data" / "train.jsonl"
        run = ChaosRun(
            self._leg, self._folder / self._leg.name, self._start, data, Service(), Clock(library), self._rng
        )
        try:
            with noted(verdict.problems):
                self._endure(run, faults, minutes, verdict)
                self._audit(run, verdict)
            verdict.steps, verdict.starts = run.steps(), run.starts
        finally:
            run.close()

    def _endure(self, run: ChaosRun, faults: list[tuple[float, str]], minutes: float, verdict: Verdict) -> None:
        """The faults, each at its time, and a preemption."""
        run.start()
        run.await_step(START_S, steps=5)
        begun = time.monotonic()
        try:
            for at_s, kind in faults:
                # A fault that takes a while may put the next one off.
                run.wait_for(begun + at_s)
                self._strike(run, kind, time.monotonic() - begun)
            run.wait_for(begun + 60 * minutes)
        finally:
            verdict.seconds = time.monotonic() - begun
        run.preempt()

    def _strike(self, run: ChaosRun, kind: str, at_s: float) -> None:
        """Have a fault happen, and wait until the run has recovered; raises Broken if it never does."""
        record = Record(leg=self._leg.name, mode=self._leg.mode, kind=kind, at_s=at_s)
        self._records.append(record)
        problems: list[str] = []
        with noted(problems):
            recover(run, kind, record)
        record.problem = " ".join(problems)
        self._keep()
        print(f"{self._leg.name} {at_s:7.1f} s, step {run.steps_at_hit}: {record}", flush=True)
        if problems:
            run.renew()

    def _audit(self, run: ChaosRun, verdict: Verdict) -> None:
        """Look at the files of the run, which was preempted."""
        verdict.problems += steps_in_order(run.folder)
        if self._leg.mode == "async":
            verdict.ledger, found = ledger_of(run.folder)
            verdict.problems += found
        if self._leg.exact:
            last = f"steps={run.steps() + MORE_STEPS}"
            run.start(last)
            run.await_success()
            whole = f"{self._leg.name}_whole"
            succeed(*run.arguments(whole, last), timeout_s=WHOLE_S)
            found = differences(run.folder, RunFolder(run.disk / whole))
            verdict.equal = not found
            verdict.problems += found


def recover(run: ChaosRun, kind: str, record: Record) -> None:
    """A fault, and what must follow it; raises Broken if that does not."""
    restarts = len(RESTARTED.findall(run.log()))
    # Those that wait for something before note it again.
    run.note_hit()
    hit = KINDS[kind].act(run)
    record.what = hit.what
    if hit.end is None:
        run.wait(hit.back, BACK_S, "return of what the fault was to")
        run.await_step(BACK_S)
        gone_on = RESTARTED.findall(run.log())[restarts:]
    else:
        record.end_s = run.end(hit) - run.hit_at
        record.ended = True
        hit.repair()
        gone_on = [run.newest_checkpoint().name.removeprefix("step_")]
        run.start(*hit.settings)
        run.wait(hit.back, START_S, "return of what the fault was to")
        run.await_step(START_S)
    record.recovery_s = time.monotonic() - run.hit_at
    record.lost_steps = max([0, *(run.steps_at_hit - int(step) for step in gone_on)])
    if record.lost_steps > hit.most_lost:
        raise Broken(f"{record.lost_steps} steps were lost, more than {hit.most_lost}")


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    with TemporaryDirectory(prefix=prefix, dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
