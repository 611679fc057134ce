"""`python -m slimrl.launch.job`: one SLURM job, from the first check of its nodes to its last process.

1. Preflight on every node of the allocation; a bad one is named, and left out where spares are enough. Then the head
   node compares those that are used with what the recipe needs.
2. The nodes that are used meet and all-reduce; nodes that do not come through are left out likewise.
3. Ray on every node, at an address that is written down; then the command on the head node.
4. Wait: the command's exit code is the job's. A Ray step that ends before it is a failure, and ends everything.
5. SIGUSR1, which SLURM sends before the time limit, or SIGTERM: the command writes a checkpoint, the job is queued
   again, and its next attempt continues from there. Queueing comes before everything that takes time: SLURM refuses
   it after the time limit, and ends what is left of the attempt by itself. After two attempts without a new checkpoint
   the job ends instead, see check_progress.

This runs on the batch host, which need not have slimrl's dependencies where a container has them: standard library
alone, Python 3.9 or newer.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from slimrl.launch.attempt import (
    MOST_UNOPENED,
    AttemptFolder,
    Preempted,
    Step,
    attempt_folder,
    check_progress,
    end_steps,
    open_attempt,
    start_alone,
    start_step,
    wait_for,
)
from slimrl.launch.meeting import Meeting
from slimrl.launch.options import add_options, check_rest, container_options, node_python, train_command
from slimrl.launch.ports import port_block
from slimrl.launch.reports import LaunchError, Selection, read_reports, select_nodes
from slimrl.launch.slurm import PREEMPTED, Allocation, requeue, this_allocation

POLL_S = 0.5
NOTICE_S = 10.0
"""How long a step of Ray's may take to end after the command that needed it."""
RECIPE_TIMEOUT_S = 120.0
"""How long the head node may take to compare the nodes with the recipe's."""
REQUEUE_TIMEOUT_S = 120.0
"""How long SLURM may take to end a job that it has queued again."""


class Job:
    """An attempt of a job under way."""

    def __init__(self, options: argparse.Namespace, allocation: Allocation, folder: AttemptFolder) -> None:
        self._options, self._allocation, self._folder = options, allocation, folder
        self._container = container_options(options)
        self._signal: str | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)

    def run(self) -> int:
        """The command's exit code, PREEMPTED where the job has been queued again.

        Raises:
            LaunchError: nodes are bad, a step died, or the job cannot be queued again.
        """
        try:
            selection = self._preflight()
            self._check_recipe(selection)
            meeting = self._meeting().meet(selection)
        except Preempted as preempted:
            say(f"{self._signal}: nothing runs yet")
            try:
                self._queue_again()
            finally:
                end_steps(preempted.steps)
            return PREEMPTED
        self._folder.write_plan(meeting.plan())
        nodes = meeting.nodes
        say(f"{len(nodes)} nodes, head {nodes[0]} at {meeting.ray_address}; logs: {self._folder.path}")
        ray = self._start("ray", nodes, "slimrl.launch.ray_node")
        command = train_command(self._options, self._allocation.job_id, self._folder.checkpoints)
        driver = self._start("driver", nodes[:1], "slimrl.launch.driver", "--", *command)
        try:
            try:
                code = self._watch(ray, driver)
            finally:
                self._folder.say("end")
            if code == PREEMPTED:
                self._queue_again()
            return code
        finally:
            driver.end()
            ray.end()

    def await_end(self) -> None:
        """Of a job that is queued again: SLURM sends SIGTERM. Where it is slow to, the attempt must not be complete."""
        deadline = time.monotonic() + REQUEUE_TIMEOUT_S
        while self._signal is None and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _preflight(self) -> Selection:
        nodes, options = self._allocation.nodes, self._options
        command = [
            *(node_python(options), "-m", "slimrl.launch.preflight", f"--folder={self._folder.path}"),
            *(f"--gpus={options.gpus_per_node}", f"--min-free-gib={options.min_free_gib}"),
            f"--first-port={port_block(self._allocation.job_id).first}",
        ]
        steps = {
            node: start_alone(
                self._folder, "preflight", node, command, container=self._container, gpus=options.gpus_per_node
            )
            for node in nodes
        }
        in_time = wait_for(list(steps.values()), options.preflight_timeout_s, self._is_preempted)
        reports = read_reports(self._folder.path / "preflight")
        unreported = {}
        for node, step in steps.items():
            within = "" if step in in_time else f" within {options.preflight_timeout_s:.0f} s"
            words = step.last_words(node)
            unreported[node] = f"sent no report{within}{': ' if words else ''}{words}"
        selection = select_nodes(nodes, reports, needed=len(nodes) - options.spares, unreported=unreported)
        for node, reason in selection.bad.items():
            say(f"preflight: left out {node}: {reason}")
        self._reports = reports
        return selection

    def _check_recipe(self, selection: Selection) -> None:
        """Raises LaunchError where the recipe is refused or needs more nodes; says so where it needs fewer."""
        options, head = self._options, selection.used[0]
        if options.command:
            return
        gpus, cores = options.gpus_per_node, options.cores_per_node
        slots = [f"--node={node}={gpus or cores or self._reports[node].cores}" for node in selection.used]
        command = [
            *(node_python(options), "-m", "slimrl.launch.recipe_nodes", f"--unit={'GPUs' if gpus else 'cores'}"),
            *(*slots, *(["--sft"] if options.sft else []), *options.rest),
        ]
        step = start_alone(self._folder, "recipe", head, command, container=self._container, gpus=gpus)
        if not step.wait(RECIPE_TIMEOUT_S, self._is_preempted):
            raise LaunchError(f"recipe: no answer within {RECIPE_TIMEOUT_S:.0f} s on {head}\n  {step.failure()}")
        if step.code:
            raise LaunchError(step.failure())
        if words := step.last_words(head):
            say(words)

    def _meeting(self) -> Meeting:
        return Meeting(
            self._folder,
            self._allocation,
            self._options,
            self._reports,
            container=self._container,
            stop=self._is_preempted,
        )

    def _start(self, name: str, nodes: Sequence[str], module: str, *arguments: str) -> Step:
        command = [node_python(self._options), "-m", module]
        command += [f"--plan={self._folder.plan}", f"--control={self._folder.control}", *arguments]
        return start_step(
            self._folder, name, nodes, command, container=self._container, gpus=self._options.gpus_per_node
        )

    def _watch(self, ray: Step, driver: Step) -> int:
        told_s: float | None = None
        while True:
            if driver.code is not None:
                if driver.code not in (0, PREEMPTED):
                    self._explain(ray, driver)
                return driver.code
            if ray.code is not None:
                raise LaunchError(ray.failure())
            if self._is_preempted() and told_s is None:
                told_s = time.monotonic()
                say(f"{self._signal}: a checkpoint is asked for")
                self._folder.say("preempt")
            if told_s is not None and time.monotonic() - told_s > self._options.grace_s:
                say(f"no new checkpoint within {self._options.grace_s:.0f} s")
                return PREEMPTED
            time.sleep(POLL_S)

    def _explain(self, ray: Step, driver: Step) -> None:
        """Say why the command failed; a node that died may have let it fail before SLURM noticed."""
        deadline = time.monotonic() + NOTICE_S
        while ray.code is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        say(driver.failure())
        if ray.code is not None:
            say(f"failed: {ray.failure()}")

    def _queue_again(self) -> None:
        """Unless attempts bring the run no further; of other commands than slimrl's that is not known."""
        if not self._options.command:
            options, job = self._options, self._allocation
            earlier = [attempt_folder(options.log_dir, job.job_id, number) for number in range(job.attempt)]
            unopened = check_progress([self._folder, *reversed(earlier)])
            if unopened:
                say(f"attempts in a row that did not come to the run: {unopened}; with {MOST_UNOPENED} the job ends")
        self._signal = None
        requeue(self._allocation.job_id)
        say("queued again")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    def _is_preempted(self) -> bool:
        return self._signal is not None


def main() -> None:
    """Run one attempt. Exit codes: those of the command; 1 where the job itself failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_options(parser)
    options = parser.parse_args()
    try:
        allocation = this_allocation()
        if options.spares >= len(allocation.nodes):
            raise LaunchError(f"--spares {options.spares} of {len(allocation.nodes)} nodes leaves none")
        check_rest(options)
        folder = open_attempt(options.log_dir, allocation.job_id, allocation.attempt)
        say(f"job {allocation.job_id}, attempt {allocation.attempt}, nodes {', '.join(allocation.nodes)}")
        job = Job(options, allocation, folder)
        code = job.run()
        if code == PREEMPTED:
            job.await_end()
    except LaunchError as error:
        say(f"failed: {error}")
        code = 1
    sys.exit(code)


def say(message: str) -> None:
    """To the job's log, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main()
