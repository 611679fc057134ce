"""The engines of a run, from the driver's side: their actors, which of them serve, and their client.

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
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimrl.base.errors import ActorLost, NodeLost, StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.engine import Engine
from slimrl.engines.client import SglangEngine
from slimrl.engines.engine_key import new_key
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.control import EngineMemory
from slimrl.engines.servers.server import ENGINE, TEACHER
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.actors import ActorGroup
from slimrl.runtime.cluster.engine_actor import ENDS_WITHIN_S, EngineAddress
from slimrl.runtime.cluster.engine_sites import EngineSites
from slimrl.runtime.cluster.reservation import Reservation

CHECK_TIMEOUT_S = 60.0
"""Seconds added to the deadline of a health check: longer than the cluster takes to notice a node that went silent."""
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
"""Seconds between two looks at actors that are waited for."""

log = logging.getLogger(__name__)


class EngineGroup:
    """All engines of a role. The constructor starts their processes; `wait_ready` waits until they answer."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, progress: Progress, places: Reservation, role: str = ENGINE
    ) -> None:
        """
        Args:
            role: ENGINE; or TEACHER, and the recipe is that of its engines (`teacher_recipe`).
        """
        self._recipe, self._folder, self._progress, self._role = recipe, folder, progress, role
        self._actors = ActorGroup({}, {}, {})
        self.key = new_key()
        """Key of all engines of the group, those that are added or started again included"""
        self._sites = EngineSites(recipe, folder, places, role, self._actors, self.key)
        self._starts = self._actors.begin("start", self._sites.start_arguments(self._sites.parts))
        self._asked: dict[str, Any] = {}
        """Pending health checks of `watch`, by actor"""
        self._down: dict[str, str] = {}
        """Engines that have ended or do not answer, with the causes"""
        self._lost: dict[str, ActorLost] = {}
        """Exceptions of the engines in `_down` of which an actor has ended"""
        self._restarts: dict[str, tuple[dict[str, Any], float]] = {}
        """Restarts of engines in `_down`: the pending calls of their actors, and the deadline"""
        self._fresh: set[str] = set()
        """Names of engines that wait for weights"""
        self._aside: tuple[str, ...] | None = None
        """Names of the engines that are set aside for evaluations; None if none are"""
        self._client: RoutedEngines | None = None
        self.num_replaced = 0
        self.addresses: list[EngineAddress] = []

    def wait_ready(self) -> None:
        """Wait until all engines answer. Raises StageError with the cause from its log if an engine does not come
        up."""
        timeout_s = self._recipe.rollout.startup_timeout_s + 60
        started = self._actors.wait(self._starts, "start", timeout_s=timeout_s)
        self.addresses = [self._sites.joined(name, started) for name in self._sites.parts]

    @property
    def receivers(self) -> list[EngineAddress]:
        """Engines that the next resync gives weights: those that are up and do not evaluate.

        On the trainer's devices also those that have ended: a resync replaces what fails in it.
        """
        others = {*(self._aside or ()), *(() if self._recipe.rollout.colocated else self._down)}
        return [address for address in self.addresses if address.name not in others]

    @property
    def need_weights(self) -> bool:
        """Whether no engine serves, and one waits for weights."""
        return bool(self._fresh) and not self._serving

    @property
    def is_restarting(self) -> bool:
        """Whether `watch` restarts engines."""
        return bool(self._restarts)

    @property
    def evaluation_is_lost(self) -> bool:
        """Whether none of the engines that were set aside is left."""
        return self._aside == ()

    def have_weights(self, names: Collection[str]) -> None:
        """Note that these engines have the current weights and serve."""
        self._fresh -= set(names)
        for name in names:
            # One may have been busy with the weights for longer than an answer may take.
            self._forget_questions(name)
        self._tell_client()

    def set_aside(self, count: int) -> int:
        """Have engines serve evaluations alone, with the weights that they have.

        Returns:
            How many there are: at most `count`, and fewer if no other would serve rollouts.
        """
        names = [address.name for address in self._serving]
        chosen = tuple(names[max(1, len(names) - count) :])
        if chosen:
            self._aside = chosen
            self._tell_client()
        return len(chosen)

    def take_back(self) -> None:
        """Have the engines that were set aside serve rollouts again, from the next resync on."""
        self._fresh |= set(self._aside or ())
        self._aside = None
        self._tell_client()

    def restart(self, ended: Mapping[str, str]) -> None:
        """Restart engines in the background. Until then they get no requests.

        Args:
            ended: their names, with the causes.

        Raises:
            StageError: `max_replacements` allows no more.
        """
        for name in ended:
            self._read({part: self._asked[part] for part in self._sites.parts[name] if part in self._asked}, "ending")
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
        calls = {part: (*(given or (None,)), port) for part, given in self._sites.start_arguments([name]).items()}
        deadline = time.monotonic() + self._recipe.rollout.startup_timeout_s + STOP_TIMEOUT_S + 60
        self._restarts[name] = self._actors.begin("restart", calls), deadline

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
        self.addresses = [address for address in self.addresses if address.name != name]
        self._fresh.discard(name)
        self._down.pop(name, None)

    def replace(self, failed: Mapping[str, str]) -> None:
        """Restart these engines, paused, at their addresses, and wait for them. The others keep running, paused.

        Args:
            failed: their names, with the causes.

        Raises:
            StageError: an engine does not come up, or `max_replacements` allows no more.
        """
        names = [*failed]
        self._count_replaced({name: cause for name, cause in failed.items() if name not in self._down})
        parts = self._sites.parts_of([name for name in names if name not in self._down])
        timeout_s = CHECK_TIMEOUT_S + self._recipe.rollout.health_timeout_s
        for name, ending in self._actors.call("ending", dict.fromkeys(parts, ()), timeout_s=timeout_s).items():
            log.warning("%s", ending or f"{name} is still running and is ended")
        timeout_s = self._recipe.rollout.startup_timeout_s + STOP_TIMEOUT_S + 60
        restarted = self._actors.call("restart", self._sites.start_arguments(names), timeout_s=timeout_s)
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
        if name in {address.name for address in self.addresses}:
            self.addresses = [fresh if address.name == name else address for address in self.addresses]
        else:
            self.addresses = [*self.addresses, fresh]
        self._forget_questions(name)
        self._down.pop(name, None)
        if self._role == ENGINE:
            self._fresh.add(name)
        for pid, node in zip(fresh.pids[1::2], fresh.nodes, strict=True):
            log.info("process %d: %s, server on %s", pid, name, node)

    def _forget_questions(self, name: str) -> None:
        """Drop the pending health checks of an engine, which are about its old server."""
        for part in self._sites.parts[name]:
            self._asked.pop(part, None)

    def flush_caches(self) -> None:
        """Flush the prefix cache of every engine; raises StageError if one has running requests."""
        names = dict.fromkeys((address.name for address in self._serving), ())
        self._actors.call("flush_cache", names, timeout_s=self._recipe.resync.timeout_s + 30)

    def pause(self) -> None:
        """Abort what runs, and let new requests wait until the next resync ends; raises StageError as `watch`."""
        names = dict.fromkeys((address.name for address in self._serving), ())
        self._ask("pause", names, timeout_s=self._recipe.resync.timeout_s)

    def release_memory(self, parts: Collection[EngineMemory]) -> None:
        """Release parts of all engines' memory; see SglangControl.release_memory. Raises StageError as `watch`."""
        self._move_memory("release_memory", parts)

    def resume_memory(self, parts: Collection[EngineMemory]) -> None:
        """Take parts of all engines' memory back; with the KV cache they serve requests again. Raises StageError as
        `watch`."""
        self._move_memory("resume_memory", parts)

    @property
    def logs(self) -> Path:
        """Folder of the run's logs."""
        return self._folder.logs

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role and node, pid) of actors and servers."""
        return tuple(
            (f"{address.name}, {process} on {node}", pid)
            for address in self.addresses
            for part, node in enumerate(address.nodes)
            for process, pid in zip(("actor", "server"), address.pids[2 * part : 2 * part + 2], strict=True)
        )

    def client(self, *, vocab_size: int, routed_experts_shape: tuple[int, int] | None) -> Engine:
        """The engines' client; it belongs to the event loop that first uses it."""
        urls = [address.url for address in self.addresses]
        resync = self._recipe.resync
        connect = partial(
            SglangEngine,
            key=self.key,
            vocab_size=vocab_size,
            routed_experts_shape=routed_experts_shape,
            keeps_caches=resync.pause is PauseMode.in_place or not resync.flush_cache,
        )
        if self._recipe.deterministic:
            return LockstepEngine([connect(url) for url in urls])
        self._client = RoutedEngines(connect, urls)
        return self._client

    def check(self) -> None:
        """Raises StageError with the cause from the log if an engine has ended that is not being replaced."""
        parts = self._sites.parts_of([name for name in self._sites.parts if name not in self._down])
        timeout_s = CHECK_TIMEOUT_S + self._recipe.rollout.health_timeout_s
        endings = self._actors.call("ending", dict.fromkeys(parts, ()), timeout_s=timeout_s)
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
        answers = self._read(self._asked, "ending")
        self._asked = {part: ref for part, ref in self._asked.items() if part not in answers}
        if ended := self._ended(answers):
            self._judge(ended)
        parts = self._sites.parts_of([name for name in self._sites.parts if name not in self._down])
        new = dict.fromkeys((part for part in parts if part not in self._asked), ())
        self._asked |= self._actors.begin("ending", new)

    def have_all_ended(self) -> bool:
        """Ask now whether all engines that a resync has failed to reach have ended or hang. They are restarted then.

        Raises:
            StageError: as `watch`.
        """
        names = [address.name for address in self.receivers]
        deadline = time.monotonic() + ENDS_WITHIN_S
        while True:
            refs = self._actors.begin("ending", dict.fromkeys(self._sites.parts_of(names), ()))
            answer_s = time.monotonic() + CHECK_TIMEOUT_S + self._recipe.rollout.health_timeout_s
            while len(answers := self._read(refs, "ending")) < len(refs) and time.monotonic() < answer_s:
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
        refs, deadline = self._restarts[name]
        answers = self._read(refs, "restart")
        failures = [str(answer) for answer in answers.values() if isinstance(answer, StageError)]
        if not failures and len(answers) < len(refs) and time.monotonic() > deadline:
            failures.append(f"{name}: did not start again in time")
            self._lost[name] = ActorLost(failures[0])
        if failures:
            del self._restarts[name]
            self.restart({name: "; ".join(failures)})
        elif len(answers) == len(refs):
            del self._restarts[name]
            self._rejoin(name, answers)
            gets = " and serves once it has the weights" if self._role == ENGINE else ""
            self._progress.say(f"{name} has started{gets}")

    def _read(self, refs: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Answers of actors that have come so far, by actor; see `answers_so_far`."""
        return self._noted(self._actors.answers_so_far(refs, method))

    def _noted(self, answers: dict[str, Any]) -> dict[str, Any]:
        """The answers of actors, after noting which engines' actors have ended."""
        for name, parts in self._sites.parts.items():
            for answer in (answers.get(part) for part in parts):
                if isinstance(answer, ActorLost) and not isinstance(self._lost.get(name), NodeLost):
                    self._lost[name] = answer
        return answers

    def _judge(self, ended: Mapping[str, str]) -> None:
        """Restart or do without engines that have ended, given with their causes, or raise; see `watch`."""
        rollout, cause = self._recipe.rollout, StageError("; ".join(ended.values()))
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
            self._actors.call("stop", dict.fromkeys(self._sites.parts_of(ended), ()), timeout_s=STOP_TIMEOUT_S)
            self._down |= ended
            self._tell_client()
        else:
            self.restart(ended)

    @property
    def _serving(self) -> list[EngineAddress]:
        """Engines that serve rollouts."""
        others = {*self._down, *self._fresh, *(self._aside or ())}
        return [address for address in self.addresses if address.name not in others]

    def _tell_client(self) -> None:
        if self._aside is not None:
            self._aside = tuple(name for name in self._aside if name in self._sites.parts and name not in self._down)
        if self._client is None:
            return
        evaluating = None
        if self._aside is not None:
            evaluating = [address.url for address in self.addresses if address.name in self._aside]
        self._client.use([address.url for address in self._serving], evaluating)

    def _move_memory(self, method: str, parts: Collection[EngineMemory]) -> None:
        # Pause, flush and release have a deadline each.
        timeout_s = 3 * self._recipe.resync.timeout_s
        self._ask(method, dict.fromkeys(self._sites.parts, (list(parts),)), timeout_s=timeout_s)

    def _ask(self, method: str, arguments: Mapping[str, tuple[Any, ...]], *, timeout_s: float) -> None:
        """Call a method of engines, and do without those that end or hang meanwhile; see `watch`.

        Args:
            timeout_s: of an engine that answers within its deadline for that.
        """
        timeout_s += CHECK_TIMEOUT_S + self._recipe.rollout.health_timeout_s
        answers = self._noted(self._actors.outcomes(self._actors.begin(method, arguments), method, timeout_s=timeout_s))
        if failed := {name: str(answer) for name, answer in answers.items() if isinstance(answer, StageError)}:
            self._judge(failed)

    def stop(self) -> None:
        """Stop the engines, then kill the actors.

        The engine of an actor that is still starting it, or cannot stop it, ends with the actor.
        """
        try:
            if self.addresses:
                parts = self._sites.parts_of([name for name in self._sites.parts if name not in self._restarts])
                self._actors.call("stop", dict.fromkeys(parts, ()), timeout_s=STOP_TIMEOUT_S)
        except StageError as error:
            log.warning("stopping the engines: %s", error)
        finally:
            self._actors.kill()
