"""The engines of a run, from the driver's side: how they start, are watched and replaced, and end.

The actors of an engine (engine_sites.py) start, end and are replaced together.

What becomes of an engine that ends or no longer answers, while others are left:

1. `watch` notices it. Its requests go on at the others (engines/routing.py).
2. Its actors restart it in the background, at the same address, paused; where an actor has ended, new ones do. An
   engine whose node was lost is gone, and others join on nodes that have room.
3. It is among the `receivers` of the next resync, and serves afterwards.

The terminal has a line when an engine is taken out, leaves, joins or has started again.

Where engines share devices with the trainer, a resync replaces it instead (`replace`): it starts when these are free.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimrl.base.errors import ActorLost, NodeLost, StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.engines.servers.control import EngineMemory
from slimrl.engines.servers.server import ENGINE, PAST, TEACHER
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.calls import Calls
from slimrl.runtime.cluster.engine_actor import ENDS_WITHIN_S, EngineActor, EngineAddress
from slimrl.runtime.cluster.engine_roster import EngineRoster
from slimrl.runtime.cluster.engine_sites import EngineSites
from slimrl.runtime.cluster.reservation import Reservation

CHECK_TIMEOUT_S = 60.0
"""Seconds added to the deadline of a health check: longer than the cluster takes to notice a node that went silent."""
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
"""Seconds between two looks at actors that are waited for."""

log = logging.getLogger(__name__)


class EngineGroup(EngineRoster):
    """All engines of a role. The constructor starts their processes; `wait_ready` waits until they answer."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, progress: Progress, places: Reservation, role: str = ENGINE
    ) -> None:
        """
        Args:
            role: ENGINE; or TEACHER or PAST, and the recipe is that of its engines (`teacher_recipe`, `past_recipe`).
        """
        super().__init__(recipe)
        self._folder, self._progress, self._role = folder, progress, role
        self._actors: ActorGroup[EngineActor] = ActorGroup()
        self._sites = EngineSites(recipe, folder, places, role, self._actors, self.key)
        self._starts = self._sites.begin(EngineActor.start, self._sites.parts)
        self._asked = self._actors.on(()).begin(EngineActor.ending)
        """Pending health checks of `watch`"""
        self._lost: dict[str, ActorLost] = {}
        """Exceptions of the engines in `_down` of which an actor has ended"""
        self._restarts: dict[str, tuple[Calls[EngineAddress], float]] = {}
        """Restarts of engines in `_down`: the pending calls of their actors, and the deadline"""
        self.num_replaced = 0

    def wait_ready(self) -> None:
        """Wait until all engines answer. Raises StageError with the cause from its log if an engine does not come
        up."""
        timeout_s = self._recipe.rollout.startup_timeout_s + 60
        started = self._starts.wait(timeout_s=timeout_s)
        self.addresses = [self._sites.joined(name, started) for name in self._sites.parts]

    @property
    def is_restarting(self) -> bool:
        """Whether `watch` restarts engines."""
        return bool(self._restarts)

    def have_weights(self, names: Collection[str]) -> None:
        for name in names:
            # One may have been busy with the weights for longer than an answer may take.
            self._forget_questions(name)
        super().have_weights(names)

    def restart(self, ended: Mapping[str, str]) -> None:
        """Restart engines in the background. Until then they get no requests.

        Args:
            ended: their names, with the causes.

        Raises:
            StageError: `max_replacements` allows no more.
        """
        for name in ended:
            self._read(self._asked.of(self._sites.parts[name]))
        gone = [name for name in ended if isinstance(self._lost.get(name), NodeLost)]
        left = len(self._sites.parts) - len(gone)
        if gone and left < (fewest := max(1, self._recipe.rollout.min_engines)):
            raise StageError(f"{'; '.join(ended.values())}; {left} of at least {fewest} engines are left")
        again = {name: cause for name, cause in ended.items() if name not in gone}
        self._count_replaced(again)
        # Now that the run does go on.
        for name in gone:
            self._remove(name)
        if again:
            log.warning("restarted while the others go on: %s", "; ".join(again.values()))
        for name, cause in again.items():
            self._progress.say(f"warning: {cause}; it is restarted while the run goes on")
            self._down[name] = cause
            self._forget_questions(name)
            self._begin_restart(name)
        self._tell_client()

    def _begin_restart(self, name: str) -> None:
        if self._lost.pop(name, None) is not None:
            self._sites.make_again(name)
        port = next((urlsplit(address.url).port for address in self.addresses if address.name == name), None)
        deadline = time.monotonic() + self._recipe.rollout.startup_timeout_s + STOP_TIMEOUT_S + 60
        self._restarts[name] = self._sites.begin(EngineActor.restart, [name], port), deadline

    def _grow(self) -> None:
        """Add an engine if there may be more and the cluster has room for it."""
        if (name := self._sites.grow()) is None:
            return
        self._progress.say(f"{name} joins the run and starts")
        self._down[name] = "it starts"
        self._begin_restart(name)

    def _remove(self, name: str) -> None:
        """Do without an engine from now on, whose node was lost."""
        text = f"the run goes on without {name}: {self._lost.pop(name)}"
        log.warning("%s", text)
        self._progress.say(f"warning: {text}")
        self._forget_questions(name)
        self._sites.remove(name)
        self._drop(name)

    def replace(self, failed: Mapping[str, str]) -> None:
        """Restart these engines, paused, at their addresses, and wait for them. The others keep running, paused.

        Args:
            failed: their names, with the causes.

        Raises:
            StageError: an engine does not come up, or `max_replacements` allows no more.
        """
        names = [*failed]
        self._count_replaced({name: cause for name, cause in failed.items() if name not in self._down})
        asked = self._ask_endings([name for name in names if name not in self._down])
        for name, ending in asked.wait(timeout_s=self._answers_within_s).items():
            log.warning("%s", ending or f"{name} is still running and is ended")
        timeout_s = self._recipe.rollout.startup_timeout_s + STOP_TIMEOUT_S + 60
        restarted = self._sites.begin(EngineActor.restart, names).wait(timeout_s=timeout_s)
        for name in names:
            self._rejoin(name, restarted)

    def _count_replaced(self, ended: Mapping[str, str]) -> None:
        limit = self._recipe.rollout.max_replacements
        if self.num_replaced + len(ended) > limit:
            what = "teacher" if self._role == TEACHER else "rollout"
            raise StageError(
                f"{'; '.join(ended.values())}; {what}.max_replacements = {limit} allows no more replacements of "
                f"engines ({self.num_replaced} so far)"
            )
        self.num_replaced += len(ended)

    def _rejoin(self, name: str, restarted: Mapping[str, EngineAddress]) -> None:
        """Count in an engine that was restarted, at the address that it had."""
        fresh = self._sites.joined(name, restarted)
        self._forget_questions(name)
        self._put(fresh, waits=self._role == ENGINE)
        for pid, node in zip(fresh.pids[1::2], fresh.nodes, strict=True):
            log.info("process %d: %s, server on %s", pid, name, node)

    def _forget_questions(self, name: str) -> None:
        """Drop the pending health checks of an engine, which are about its old server."""
        self._asked = self._asked.of(self._asked.refs.keys() - set(self._sites.parts[name]))

    def load_checkpoint(self, folder: Path, version: int) -> None:
        """Have all engines serve a Hugging Face checkpoint of their model as this version. No request may run, and no
        resync may reach these engines. Raises StageError: one did not load it."""
        for address in self.addresses:
            self._forget_questions(address.name)
        # The load, the flush and the version have a deadline each.
        loads = self._serving_actors().begin(EngineActor.load_checkpoint, folder.absolute(), version)
        loads.wait(timeout_s=3 * self._recipe.resync.timeout_s + 30)

    def flush_caches(self) -> None:
        """Flush the prefix cache of every engine; raises StageError if one has running requests."""
        self._serving_actors().begin(EngineActor.flush_cache).wait(timeout_s=self._recipe.resync.timeout_s + 30)

    def pause(self) -> None:
        """Abort what runs, and let new requests wait until the next resync ends; raises StageError as `watch`."""
        self._do_without_failed(
            self._serving_actors().begin(EngineActor.pause), timeout_s=self._recipe.resync.timeout_s
        )

    def release_memory(self, parts: Collection[EngineMemory]) -> None:
        """Release parts of all engines' memory; see SglangControl.release_memory. Raises StageError as `watch`."""
        self._move_memory(EngineActor.release_memory, parts)

    def resume_memory(self, parts: Collection[EngineMemory]) -> None:
        """Take parts of all engines' memory back; with the KV cache they serve requests again. Raises StageError as
        `watch`."""
        self._move_memory(EngineActor.resume_memory, parts)

    @property
    def logs(self) -> Path:
        """Folder of the run's logs."""
        return self._folder.logs

    def check(self) -> None:
        """Raises StageError with the cause from the log if an engine has ended that is not being replaced."""
        up = [name for name in self._sites.parts if name not in self._down]
        endings = self._ask_endings(up).wait(timeout_s=self._answers_within_s)
        if causes := [text for text in endings.values() if text]:
            raise StageError("; ".join(causes))

    def watch(self) -> None:
        """Check the engines' health; call it repeatedly while episodes run. It asks the engines, and reads their
        answers in a later call.

        Raises:
            StageError: an engine has ended or does not answer, and the run cannot go on without it: `deterministic`,
                no other engine, or no replacement left (`max_replacements`).
        """
        for name in list(self._restarts):
            self._look_at_restart(name)
        if self._role == ENGINE and self._recipe.may_add_engines:
            self._grow()
        answers = self._read(self._asked)
        self._asked = self._asked.of(self._asked.refs.keys() - answers.keys())
        if ended := self._ended(answers):
            self._judge(ended)
        parts = self._sites.parts_of([name for name in self._sites.parts if name not in self._down])
        new = [part for part in parts if part not in self._asked.refs]
        self._asked |= self._actors.on(new).begin(EngineActor.ending)

    def have_all_ended(self) -> bool:
        """Ask now whether all engines that a resync has failed to reach have ended or hang. They are restarted then.

        Raises:
            StageError: as `watch`.
        """
        names = [address.name for address in self.receivers]
        deadline = time.monotonic() + ENDS_WITHIN_S
        while True:
            asked = self._ask_endings(names)
            answer_s = time.monotonic() + self._answers_within_s
            while len(answers := self._read(asked)) < len(asked) and time.monotonic() < answer_s:
                time.sleep(POLL_S)
            ended = self._ended(answers)
            if len(ended) == len(names):
                self._judge(ended)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)

    def wait_for_receivers(self) -> None:
        """Wait until the next resync reaches an engine; raises StageError as `watch`."""
        while not self.receivers:
            self.watch()
            time.sleep(POLL_S)

    def _ended(self, answers: Mapping[str, Any]) -> dict[str, str]:
        """Engines that have ended or do not answer, by what their actors say, with the causes."""
        texts = {
            name: "; ".join(str(answers[part]) for part in parts if answers.get(part))
            for name, parts in self._sites.parts.items()
            if name not in self._down
        }
        return {name: text for name, text in texts.items() if text}

    def _look_at_restart(self, name: str) -> None:
        """Count in an engine that has been restarted; try again if that failed."""
        calls, deadline = self._restarts[name]
        answers = self._read(calls)
        started = {part: answer for part, answer in answers.items() if not isinstance(answer, StageError)}
        failures = [str(answer) for answer in answers.values() if isinstance(answer, StageError)]
        if not failures and len(answers) < len(calls) and time.monotonic() > deadline:
            failures.append(f"{name}: did not start again in time")
            self._lost[name] = ActorLost(failures[0])
        if failures:
            del self._restarts[name]
            self.restart({name: "; ".join(failures)})
        elif len(started) == len(calls):
            del self._restarts[name]
            self._rejoin(name, started)
            gets = " and serves once it has the weights" if self._role == ENGINE else ""
            self._progress.say(f"{name} has started{gets}")

    def _ask_endings(self, names: Collection[str]) -> Calls[str]:
        """Ask engines, all of their parts, whether they have ended."""
        return self._actors.on(self._sites.parts_of(names)).begin(EngineActor.ending)

    @property
    def _answers_within_s(self) -> float:
        """Deadline of `_ask_endings`."""
        return CHECK_TIMEOUT_S + self._recipe.rollout.health_timeout_s

    def _read[T](self, calls: Calls[T]) -> dict[str, T | StageError]:
        """Answers of actors that have come so far, by actor; see `answers_so_far`."""
        return self._noted(calls.answers_so_far())

    def _noted[T](self, answers: dict[str, T]) -> dict[str, T]:
        """The answers of actors, after noting which engines' actors have ended."""
        for name, parts in self._sites.parts.items():
            for answer in (answers.get(part) for part in parts):
                if isinstance(answer, ActorLost) and not isinstance(self._lost.get(name), NodeLost):
                    self._lost[name] = answer
        return answers

    def _judge(self, ended: Mapping[str, str]) -> None:
        """Restart or do without engines that have ended, given with their causes, or raise; see `watch`."""
        rollout, cause = self._recipe.rollout, StageError("; ".join(ended.values()))
        if self._role == PAST:
            # One that is started again would have the weights of the run's first model.
            raise cause
        if self._role == TEACHER:
            if any(isinstance(self._lost.get(name), NodeLost) for name in ended):
                raise cause
            self.restart(ended)
            return
        # In an asynchronous rollout, requests wait until an engine has been restarted, and `need_weights` says so.
        are_left = {address.name for address in self._serving} - ended.keys() or rollout.mode is not RolloutMode.sync
        if self._recipe.deterministic or not are_left or (rollout.colocated and self._lost):
            raise cause
        if rollout.colocated:
            self._count_replaced(ended)
            for of_one in ended.values():
                text = f"{of_one}; the others continue, and the next resync replaces it"
                log.warning("%s", text)
                self._progress.say(f"warning: {text}")
            # One that hangs holds memory.
            self._actors.on(self._sites.parts_of(ended)).begin(EngineActor.stop).wait(timeout_s=STOP_TIMEOUT_S)
            self._down |= ended
            self._tell_client()
        else:
            self.restart(ended)

    def _serving_actors(self) -> ActorGroup[EngineActor]:
        """The actors that answer for the engines that serve rollouts."""
        return self._actors.on([address.name for address in self._serving])

    def _move_memory(
        self, move: Callable[[EngineActor, list[EngineMemory]], None], parts: Collection[EngineMemory]
    ) -> None:
        calls = self._actors.on(self._sites.parts).begin(move, list(parts))
        # Pause, flush and release have a deadline each.
        self._do_without_failed(calls, timeout_s=3 * self._recipe.resync.timeout_s)

    def _do_without_failed(self, calls: Calls[None], *, timeout_s: float) -> None:
        """Wait for calls of engines, and do without those that end or hang meanwhile; see `watch`.

        Args:
            timeout_s: of an engine that answers within its deadline for that.
        """
        answers = self._noted(calls.outcomes(timeout_s=timeout_s + self._answers_within_s))
        if failed := {name: str(answer) for name, answer in answers.items() if isinstance(answer, StageError)}:
            self._judge(failed)

    def stop(self) -> None:
        """Stop the engines, then kill the actors.

        The engine of an actor that is still starting it, or cannot stop it, ends with the actor.
        """
        try:
            if self.addresses:
                parts = self._sites.parts_of([name for name in self._sites.parts if name not in self._restarts])
                self._actors.on(parts).begin(EngineActor.stop).wait(timeout_s=STOP_TIMEOUT_S)
        except StageError as error:
            log.warning("stopping the engines: %s", error)
        finally:
            self._actors.kill()
