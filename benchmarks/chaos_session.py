"""The legs of a session, one after the other, with the faults that happen to each."""

import os
import random
import re
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import psutil
from chaos_clock import Clock
from chaos_judge import differences, ledger_of, left_files, steps_in_order
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

    for number, leg in enumerate(legs):
        weight = len(kinds[leg]) / sum(len(kinds[one]) for one in legs[number:])
        if count := round((total - len(records)) * weight):
            played = LegSession(leg, folder, start, random.Random(rng.random()), records, keep_all)
            verdicts.append(played.play(kinds[leg], count, options.minutes * count / total))
            keep_all()
    return records, verdicts


def kinds_of(leg: Leg, asked: list[str] | None) -> list[str]:
    return [name for name, kind in KINDS.items() if kind.suits(leg) and (not asked or name in asked)]


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
        # Short, since sockets lie in it; what is left there is a problem.
        self._temporary = Path(tempfile.mkdtemp(prefix="sc-", dir="/tmp"))
        self._library = Path(tempfile.mkdtemp(prefix="sc-clock-", dir="/tmp"))
        os.environ["TMPDIR"] = str(self._temporary)
        data = folder / "data" / "train.jsonl"
        self._run = ChaosRun(leg, folder / leg.name, start, data, Service(), Clock(self._library), rng)

    def play(self, kinds: list[str], count: int, minutes: float) -> Verdict:
        """So many faults of these kinds, in so many minutes or as long as it takes."""
        order = self._rng.sample(kinds, len(kinds))
        planned = [order[number % len(order)] for number in range(count)]
        self._rng.shuffle(planned)
        times_s = sorted(self._rng.uniform(0, 60 * minutes) for _ in planned)
        run, begun = self._run, time.monotonic()
        verdict = Verdict(leg=self._leg.name, mode=self._leg.mode)
        try:
            run.start()
            run.await_step(START_S, steps=5)
            begun = time.monotonic()
            for at_s, kind in zip(times_s, planned, strict=True):
                # A fault that takes a while may put the next one off.
                run.wait_for(begun + at_s)
                self._strike(kind, time.monotonic() - begun)
            run.wait_for(begun + 60 * minutes)
            verdict.seconds = time.monotonic() - begun
            run.preempt()
            self._audit(verdict)
        except Broken as error:
            verdict.seconds = verdict.seconds or time.monotonic() - begun
            verdict.problems.append(str(error))
            run.kill()
        finally:
            verdict.steps, verdict.starts = run.steps(), run.starts
            run.close()
        verdict.problems += [f"left: {path}" for path in left_files(self._temporary)]
        shutil.rmtree(self._temporary)
        shutil.rmtree(self._library)
        return verdict

    def _strike(self, kind: str, at_s: float) -> None:
        """Have a fault happen, and wait until the run has recovered; raises Broken if it never does."""
        run, began = self._run, time.monotonic()
        record = Record(leg=self._leg.name, mode=self._leg.mode, kind=kind, at_s=at_s)
        self._records.append(record)
        steps, restarts = run.steps(), RESTARTED.findall(run.log())
        try:
            hit = KINDS[kind].act(run)
            record.what = hit.what
            if hit.end is None:
                run.wait(hit.back, BACK_S, "return of what the fault was to")
                run.await_step(BACK_S)
                gone_on = RESTARTED.findall(run.log())[len(restarts) :]
            else:
                record.ended = True
                run.end(hit)
                record.end_s = time.monotonic() - began
                hit.repair()
                gone_on = [run.checkpoints()[-1].name.removeprefix("step_")]
                run.start(*hit.settings)
                run.await_step(START_S)
            record.recovery_s = time.monotonic() - began
            record.lost_steps = max([0, *(steps - int(step) for step in gone_on)])
        except (Broken, psutil.Error) as error:
            record.problem = str(error)
            self._keep()
            run.kill()
            run.free_disk()
            run.renew_nodes()
            run.start()
            run.await_step(START_S)
        self._keep()
        print(f"{self._leg.name} {at_s:7.1f} s, step {steps}: {record}", flush=True)

    def _audit(self, verdict: Verdict) -> None:
        """Look at the files of the run, which was preempted."""
        run = self._run
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
