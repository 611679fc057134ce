"""In which order the processes of a run start and end, by stand-ins that note what is asked of them."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.runtime.cluster import processes

CHECKPOINT, FILES = Path("checkpoints/step_000002"), "digests"


class Noted:
    """One kind of process; every call goes into a list that all share."""

    def __init__(self, name: str, calls: list[str], total_updates: int | None = None) -> None:
        calls.append(f"make {name}" + (f" for {total_updates} updates" if total_updates else ""))
        self._name, self._calls = name, calls

    def __getattr__(self, method: str):
        def call(*arguments):
            shown = "".join(f" {sorted(part.value for part in a) if isinstance(a, list) else a}" for a in arguments)
            self._calls.append(f"{self._name}: {method}{shown}")

        return call


GROUPS = {"teacher": "teachers", "past": "older versions"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    monkeypatch.setattr(
        processes, "EngineGroup", lambda *given: Noted(GROUPS[given[4]] if given[4:] else "engines", noted)
    )
    monkeypatch.setattr(
        processes,
        "TrainerGroup",
        lambda *given, total_updates, spares: Noted(f"{given[4] if given[4:] else 'trainer'}", noted, total_updates),
    )
    return noted


def start(
    *,
    colocated: bool,
    total_updates: int | None,
    num_engines: int = 1,
    num_teachers: int = 0,
    num_past: int = 0,
    num_critics: int = 0,
) -> None:
    recipe = Recipe()
    recipe.rollout.colocated = colocated
    recipe.trainer.updates_per_rollout, recipe.critic.warmup_steps = 2, 3
    placement = SimpleNamespace(
        engines=[()] * num_engines,
        teachers=[()] * num_teachers,
        past=[()] * num_past,
        critics=[SimpleNamespace()] * num_critics,
    )
    places = SimpleNamespace(placement=placement)
    with ExitStack() as ends:
        started = processes.start_processes(
            recipe,
            None,
            None,
            ends,
            places,
            total_updates=total_updates,
            checkpoint=CHECKPOINT,
            files=FILES,
            spares=None,
        )
        assert (started.engines is None) == (num_engines == 0)
        assert (started.trainers is None) == (total_updates is None)
        assert (started.critics is None) == (num_critics == 0)


ENDS = ["trainer: kill", "engines: stop"]
"""Engines last, for they remove what the trainer leaves in shared memory."""


def test_engines_that_share_devices_start_when_the_trainer_holds_nothing(calls: list[str]):
    start(colocated=True, total_updates=40)
    assert calls == [
        "make trainer for 40 updates",
        f"trainer: start {CHECKPOINT} {FILES}",
        "trainer: release_memory ['gradients', 'optimizer', 'weights']",
        "make engines",
        "engines: wait_ready",
        *ENDS,
    ]


def test_engines_with_devices_of_their_own_start_beside_the_trainer_which_keeps_its_memory(calls: list[str]):
    start(colocated=False, total_updates=40)
    assert calls == [
        "make engines",
        "make trainer for 40 updates",
        f"trainer: start {CHECKPOINT} {FILES}",
        "engines: wait_ready",
        *ENDS,
    ]


def test_a_trainer_or_engines_alone_have_the_devices_to_themselves(calls: list[str]):
    start(colocated=True, total_updates=40, num_engines=0)
    assert calls == ["make trainer for 40 updates", f"trainer: start {CHECKPOINT} {FILES}", "trainer: kill"]
    calls.clear()
    start(colocated=True, total_updates=None)
    assert calls == ["make engines", "engines: wait_ready", "engines: stop"]


def test_a_teacher_has_devices_of_its_own_and_is_waited_for_last(calls: list[str]):
    start(colocated=True, total_updates=40, num_teachers=2)
    assert calls == [
        "make teachers",
        "make trainer for 40 updates",
        f"trainer: start {CHECKPOINT} {FILES}",
        "trainer: release_memory ['gradients', 'optimizer', 'weights']",
        "make engines",
        "engines: wait_ready",
        "teachers: wait_ready",
        "trainer: kill",
        "engines: stop",
        "teachers: stop",
    ]


def test_engines_of_older_versions_have_devices_of_their_own_too(calls: list[str]):
    start(colocated=True, total_updates=40, num_past=1)
    assert calls == [
        "make older versions",
        "make trainer for 40 updates",
        f"trainer: start {CHECKPOINT} {FILES}",
        "trainer: release_memory ['gradients', 'optimizer', 'weights']",
        "make engines",
        "engines: wait_ready",
        "older versions: wait_ready",
        "trainer: kill",
        "engines: stop",
        "older versions: stop",
    ]


def test_a_critic_loads_its_part_of_the_checkpoint_after_the_trainer_and_keeps_its_memory(calls: list[str]):
    """Both processes import at the same time. The policy makes no update in three steps of two updates each."""
    start(colocated=True, total_updates=40, num_critics=2)
    assert calls == [
        "make trainer for 34 updates",
        "make critic for 40 updates",
        f"trainer: start {CHECKPOINT} {FILES}",
        f"critic: start {CHECKPOINT}",
        "trainer: release_memory ['gradients', 'optimizer', 'weights']",
        "make engines",
        "engines: wait_ready",
        "critic: kill",
        *ENDS,
    ]
