"""`python -m slimrl.launch.job`: one attempt of a SLURM job, from the check of its nodes to its last process.

1. Preflight on every node of the allocation. A bad node is named, and left out if there are enough spares. Then the
   head node compares the selected nodes with the recipe's needs.
2. All-reduce between the selected nodes. Nodes that fail are left out likewise.
3. Ray on every node, at the address in the plan; then the command on the head node.
4. The command's exit code is the job's. If Ray ends first, the job fails and ends everything. With --spare-nodes it
   goes on while Ray runs on the head node: the command decides what a lost node means.
5. On SIGUSR1, which SLURM sends before the time limit, or SIGTERM, the command writes a checkpoint, the job requeues
   itself, and its next attempt continues from there. The requeue comes before anything slow: SLURM refuses it after the
   time limit, and ends the rest of the attempt itself. After two attempts without a new checkpoint the job ends
   instead, see check_progress.

This runs on the batch host, which needs no dependencies of slimrl if a container has them: standard library alone,
Python 3.9 or newer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from slimrl.base.visible import visible
from slimrl.launch.allreduce_probe import AllReduceProbe
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
from slimrl.launch.options import add_options, check_rest, train_command
from slimrl.launch.ports import port_block
from slimrl.launch.reports import LaunchError, Selection, read_reports, select_nodes
from slimrl.launch.slurm import PREEMPTED, Allocation, requeue, this_allocation

RAY_NODE = "slimrl.launch.ray_node"
POLL_S = 0.5
NOTICE_S = 10.0
"""How long a failed command waits for Ray to end too, before the log says which failed."""
RECIPE_TIMEOUT_S = 120.0
"""Deadline of the head node's comparison of nodes and recipe."""
REQUEUE_TIMEOUT_S = 120.0
"""How long SLURM may take to end a requeued job."""


class Job:
    def __init__(self, options: argparse.Namespace, allocation: Allocation, folder: AttemptFolder) -> None:
        self._options, self._allocation, self._folder = options, allocation, folder
        self._signal: str | None = None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._note)

    def run(self) -> int:
        """The command's exit code; PREEMPTED after a requeue.

        Raises:
            LaunchError: nodes are bad, a step died, or the job cannot be requeued.
        """
        try:
            selection = self._preflight()
            self._check_recipe(selection)
            probe = self._allreduce_probe().run(selection)
        except Preempted as preempted:
            say(f"{self._signal}: the command has not started yet")
            try:
                self._requeue()
            finally:
                end_steps(preempted.steps)
            return PREEMPTED
        self._folder.plan.write_text(json.dumps(probe.plan(), indent=2) + "\n")
        nodes = probe.nodes
        say(f"{len(nodes)} nodes, head {nodes[0]} at {probe.ray_address}; logs: {self._folder.path}")
        rays = self._start_ray(nodes)
        command = train_command(self._options, self._allocation.job_id, self._folder.checkpoints)
        driver = self._start("driver", nodes[:1], "slimrl.launch.driver", "--", *command)
        try:
            try:
                code = self._watch(rays, driver)
            finally:
                self._folder.say("end")
            if code == PREEMPTED:
                self._requeue()
            return code
        finally:
            driver.end()
            for ray in rays:
                ray.end()

    def await_end(self) -> None:
        """Wait for the SIGTERM that SLURM sends a requeued job; ending before it would complete the job."""
        deadline = time.monotonic() + REQUEUE_TIMEOUT_S
        while self._signal is None and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _preflight(self) -> Selection:
        nodes, options = self._allocation.nodes, self._options
        arguments = [
            *(f"--folder={self._folder.path}", f"--gpus={options.gpus_per_node}"),
            f"--min-free-gib={options.min_free_gib}",
            f"--first-port={port_block(self._allocation.job_id).first}",
        ]
        steps = {
            node: start_alone(self._folder, options, "preflight", node, "slimrl.launch.preflight", *arguments)
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
        """Raises LaunchError if the recipe is refused or needs more nodes; logs it if it needs fewer."""
        options, head = self._options, selection.used[0]
        if options.command:
            return
        gpus, cores, spares = options.gpus_per_node, options.cores_per_node, f"--spare-nodes={options.spare_nodes}"
        slots = [f"--node={node}={gpus or cores or self._reports[node].cores}" for node in selection.used]
        unit, sft = "GPUs" if gpus else "cores", ["--sft"] if options.sft else []
        arguments = [f"--unit={unit}", spares, *slots, *sft, *options.rest]
        step = start_alone(self._folder, options, "recipe", head, "slimrl.launch.recipe_nodes", *arguments)
        if not step.wait(RECIPE_TIMEOUT_S, self._is_preempted):
            raise LaunchError(f"recipe: no answer within {RECIPE_TIMEOUT_S:.0f} s on {head}\n  {step.failure()}")
        if step.code:
            raise LaunchError(step.failure())
        if words := step.last_words(head):
            say(words)

    def _allreduce_probe(self) -> AllReduceProbe:
        return AllReduceProbe(self._folder, self._allocation, self._options, self._reports, self._is_preempted)

    def _start_ray(self, nodes: Sequence[str]) -> list[Step]:
        """The head's step first. A step ends where one of its nodes fails: with spare nodes each node has its own."""
        if not self._options.spare_nodes:
            return [self._start("ray", nodes, RAY_NODE)]
        given = (RAY_NODE, *self._paths)
        return [start_alone(self._folder, self._options, "ray", node, *given) for node in nodes]

    def _start(self, name: str, nodes: Sequence[str], module: str, *arguments: str) -> Step:
        return start_step(self._folder, self._options, name, nodes, module, *self._paths, *arguments)

    @property
    def _paths(self) -> tuple[str, str]:
        return f"--plan={self._folder.plan}", f"--control={self._folder.control}"

    def _watch(self, rays: Sequence[Step], driver: Step) -> int:
        told_s: float | None = None
        running = list(rays)
        while True:
            if driver.code is not None:
                if driver.code not in (0, PREEMPTED):
                    self._explain(running, driver)
                return driver.code
            if rays[0].code is not None:
                raise LaunchError(rays[0].failure())
            for ray in [ray for ray in running if ray.code is not None]:
                running.remove(ray)
                say(f"{', '.join(ray.nodes)} is lost: {ray.failure()}")
            if self._is_preempted() and told_s is None:
                told_s = time.monotonic()
                say(f"{self._signal}: asking for a checkpoint")
                self._folder.say("preempt")
            if told_s is not None and time.monotonic() - told_s > self._options.grace_s:
                say(f"no new checkpoint within {self._options.grace_s:.0f} s")
                return PREEMPTED
            time.sleep(POLL_S)

    def _explain(self, rays: Sequence[Step], driver: Step) -> None:
        """Log why the command failed. If a node died, the command may fail before SLURM notices."""
        deadline = time.monotonic() + NOTICE_S
        while all(ray.code is None for ray in rays) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        say(driver.failure())
        for ray in rays:
            if ray.code is not None:
                say(f"failed: {ray.failure()}")

    def _requeue(self) -> None:
        """Unless the attempts make no progress, which can be seen of slimrl's own commands only."""
        options, job = self._options, self._allocation
        if not options.command:
            earlier = [attempt_folder(options.log_dir, job.job_id, number) for number in range(job.attempt)]
            unopened = check_progress([self._folder, *reversed(earlier)])
            if unopened:
                say(f"attempts in a row that did not open the run: {unopened}; after {MOST_UNOPENED} the job ends")
        self._signal = None
        requeue(job.job_id)
        say("requeued")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    def _is_preempted(self) -> bool:
        return self._signal is not None


def main() -> None:
    """Run one attempt. Exit code: the command's; 1 if the job itself failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_options(parser)
    options = parser.parse_args()
    try:
        allocation = this_allocation()
        if options.spares + options.spare_nodes >= len(allocation.nodes):
            spares = f"--spares {options.spares} and --spare-nodes {options.spare_nodes}"
            raise LaunchError(f"{spares} leave none of {len(allocation.nodes)} nodes")
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
    """Print to the job's log, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {visible(message)}", flush=True)


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main()
