"""What the driver's side of the trainer sends to which rank, and what it makes of the answers, without any actor."""

import inspect
import re
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from slimrl.algorithms.objective import loss_function
from slimrl.base.errors import ActorLost, NotLoaded, NotWritten, StageError, TrainerLost
from slimrl.checkpoints.digests import FileDigest, differences, file_digests
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.data.packing import pack
from slimrl.data.trajectory import Segment
from slimrl.runtime.cluster import trainer_group
from slimrl.runtime.cluster.node_processes import NodeProcess
from slimrl.runtime.cluster.placement import Node
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.trainer_actor import TrainerActor
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.state import CheckpointFolder, RunState

DATA_RANKS = (0, 0, 1, 1)
"""Data-parallel ranks of four ranks, in pairs; the second of each pair reports."""


class Answers(dict):
    """Calls of actors that have answered at once."""

    def __init__(self, method: str, found: dict, ranks: "Ranks") -> None:
        super().__init__(found)
        self.method, self.ranks = method, ranks

    def __or__(self, others: "Answers") -> "Answers":
        assert self.method == others.method
        return Answers(self.method, {**self, **others}, self.ranks)

    def wait(self, *, timeout_s, while_waiting=None):
        self.ranks.timeouts.append((self.method, timeout_s))
        if self.ranks.are_slow and while_waiting is not None:
            while_waiting()
            while_waiting()
        if self.method in self.ranks.failures:
            raise self.ranks.failures[self.method]
        return dict(self)


class Ranks:
    """An ActorGroup whose actors answer at once with what `answers` says, and that notes every call."""

    def __init__(self) -> None:
        self.names, self.calls, self.timeouts = [], [], []
        self.are_slow = False
        self.failures: dict[str, StageError] = {}
        """Errors of calls, by the method"""
        self.answers = {
            "process": lambda rank: NodeProcess(100 + rank, 1.0),
            "rendezvous": lambda rank, on_one_node: "file:///meet" if on_one_node else "tcp://10.0.0.1:29500",
            "start": lambda rank, meeting: SimpleNamespace(rank=rank, data=2, data_rank=DATA_RANKS[rank]),
            "finish_checkpoint": lambda rank, directory: {
                f"__{rank}_0.distcp": FileDigest(bytes=rank, xxh3_128=str(rank))
            },
        }

    @property
    def handles(self):
        return dict.fromkeys(self.names, SimpleNamespace(progress=SimpleNamespace(remote=lambda: None)))

    def add(self, name, actor, log, node):
        self.names.append(name)

    def on(self, names):
        chosen = copy(self)
        chosen.names = list(names)
        return chosen

    def begin(self, method, *given, **options):
        # As the rank itself would take them.
        inspect.signature(method).bind(None, *given, **options)
        self.calls.append((method.__name__, dict.fromkeys(self.names, (*given, *options.values()))))
        answer = self.answers.get(method.__name__, lambda rank, *_: None)
        found = {name: answer(int(name.split()[1]), *given, *options.values()) for name in self.names}
        return Answers(method.__name__, found, self)

    def last(self, method):
        """Arguments by rank, and the deadline."""
        given = {}
        for name, of_ranks in reversed(self.calls):
            if name == method and not given.keys() & of_ranks.keys():
                given = {**of_ranks, **given}
        return given, next(timeout_s for name, timeout_s in reversed(self.timeouts) if name == method)


class ActorClass:
    """Notes with which options and arguments actors are made."""

    def __init__(self) -> None:
        self.made, self.critics = [], []

    def options(self, **options):
        return SimpleNamespace(
            remote=lambda *arguments, critic: self.made.append((options, arguments)) or self.critics.append(critic)
        )


@contextmanager
def no_phase(name, total, unit):
    yield None


@pytest.fixture
def actor_class(monkeypatch) -> ActorClass:
    made = ActorClass()
    monkeypatch.setattr(trainer_group, "RemoteTrainer", made)
    return made


@pytest.fixture
def group(monkeypatch, actor_class) -> TrainerGroup:
    """Four ranks that have started, two on each of two nodes."""
    made = make(monkeypatch, "trainer")
    made.start()
    return made


def make(monkeypatch, role: str) -> TrainerGroup:
    """Ranks that have not started."""
    monkeypatch.setattr(trainer_group, "ActorGroup", Ranks)
    monkeypatch.setattr(ray, "put", lambda value: value)
    recipe = Recipe()
    recipe.resync.transport = TransportName.p2p
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    recipe.trainer.startup_timeout_s, recipe.trainer.timeout_s, recipe.trainer.threads_per_rank = 11.0, 22.0, 3
    nodes = [
        Node(node_id=f"{number}", name=f"node{number}", address=f"10.0.0.{number}", slots=2) for number in range(3)
    ]
    slots = [SimpleNamespace(rank=rank, node=nodes[rank // 2]) for rank in range(6)]
    places = SimpleNamespace(
        placement=SimpleNamespace(ranks=slots[:4], critics=slots[4:]),
        options=lambda slot, variables: {"slot": slot.rank, **variables},
    )
    folder = SimpleNamespace(log_file=lambda name: Path(f"{name}.log"))
    return TrainerGroup(recipe, folder, SimpleNamespace(phase=no_phase), places, role, total_updates=40)


def batch_of_two_ranks():
    """Micro-batches by data-parallel rank."""
    segments = [[Segment.not_sampled(range(9), [True] * 9)] for _ in range(4)]
    return pack(segments, np.zeros(4, np.float32), budget_tokens=8, alignment=1, data_parallel=2)


def test_an_actor_is_made_for_each_rank_in_its_place(group, actor_class):
    given = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    assert [options for options, _ in actor_class.made] == [{"slot": rank, **given} for rank in range(4)]
    for rank, (_, (_, log_file, _, number, node, total_updates)) in enumerate(actor_class.made):
        assert log_file == Path(f"trainer_{rank}.log").absolute()
        assert (number, node, total_updates) == (rank, f"node{rank // 2}", 40)
    assert actor_class.critics == [False] * 4
    assert group.roles == (
        ("trainer 0 on node0", 100),
        ("trainer 1 on node0", 101),
        ("trainer 2 on node1", 102),
        ("trainer 3 on node1", 103),
    )


def test_a_critic_s_ranks_are_on_its_slots_under_its_name_and_load_its_part_of_a_checkpoint(monkeypatch, actor_class):
    group = make(monkeypatch, "critic")
    assert [options["slot"] for options, _ in actor_class.made] == [4, 5]
    assert [(log_file.name, number) for _, (_, log_file, _, number, *_) in actor_class.made] == [
        ("critic_0.log", 0),
        ("critic_1.log", 1),
    ]
    assert actor_class.critics == [True] * 2
    group.start(Path("runs/checkpoints/step_000004"))
    given, _ = group._actors.last("load_checkpoint")
    part = Path("runs/checkpoints/step_000004/critic").absolute()
    assert given == dict.fromkeys(("critic 0", "critic 1"), (part, None))
    assert group.roles == (("critic 0 on node2", 100), ("critic 1 on node2", 101))


def test_what_runs_beside_the_ranks_is_looked_at_while_they_work_but_not_too_often(group, monkeypatch):
    seen, now = [], 100.0
    group._actors.are_slow = True
    monkeypatch.setattr(trainer_group.time, "monotonic", lambda: now)
    group.meanwhile = lambda: seen.append(now)
    group.call(RankBatches.step)
    now += 0.5 * trainer_group.MEANWHILE_S
    group.call(RankBatches.step)
    now += trainer_group.MEANWHILE_S
    group.release_memory([])
    assert seen == [100.0, 100.0 + 1.5 * trainer_group.MEANWHILE_S]
    # Engines that load weights are not asked how they are.
    now += 10.0
    group._actors.answers["resync"] = lambda rank, version: "report"
    group.resync(1)
    assert len(seen) == 2


def test_pieces_of_an_update_go_from_the_ranks_of_one_group_to_all_ranks_of_another(group, monkeypatch):
    group._actors.answers["give"] = lambda rank, update, names: [f"{names} of {update} on {rank}"] if rank % 2 else []
    put: list = []
    monkeypatch.setattr(ray, "put", lambda value: put.append(value) or value)
    group.send(1, ["old_logprobs", "values"], group)
    given, timeout_s = group._actors.last("take")
    pieces = [f"['old_logprobs', 'values'] of 1 on {rank}" for rank in (1, 3)]
    assert (list(given.values()), timeout_s) == ([(1, pieces)] * 4, 22.0)
    # One object for all ranks, whose number of references grows with the ranks.
    assert len({id(given_pieces) for _, given_pieces in given.values()}) == 1
    assert given["trainer 0"][1] in put


def test_all_ranks_meet_where_the_first_one_says_before_weights_are_loaded(group):
    calls = group._actors.calls
    assert [method for method, _ in calls] == ["process", "rendezvous", "start", "load_weights"]
    assert [timeout_s for _, timeout_s in group._actors.timeouts] == [11.0] * 4
    assert calls[1][1] == {"trainer 0": (False,)}
    assert calls[2][1] == {f"trainer {rank}": ("tcp://10.0.0.1:29500",) for rank in range(4)}
    assert group.layout.rank == 0


def test_ranks_on_one_node_meet_at_a_file(monkeypatch, actor_class):
    """The critic's two ranks are both on the third node."""
    made = make(monkeypatch, "critic")
    made.start()
    calls = made._actors.calls
    assert calls[1][1] == {"critic 0": (True,)}
    assert calls[2][1] == {f"critic {rank}": ("file:///meet",) for rank in range(2)}


def test_the_file_at_which_ranks_meet_is_in_a_folder_of_this_user_alone_that_goes_with_the_rank():
    actor = object.__new__(TrainerActor)
    path = Path(actor.rendezvous(True).removeprefix("file://"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert re.fullmatch(r"tcp://[\d.]+:\d+", actor.rendezvous(False))
    path.touch()
    actor.resync_session, actor.controls, actor.worker = None, [], SimpleNamespace(close=lambda: None)
    actor.close()
    assert not path.parent.exists()


def test_a_checkpoint_is_loaded_after_the_weights_by_its_absolute_path(group):
    group.start(Path("runs/checkpoints/step_000004"))
    assert [method for method, _ in group._actors.calls[-5:]] == ["load_weights", *4 * ["load_checkpoint"]]
    given, timeout_s = group._actors.last("load_checkpoint")
    assert set(given.values()) == {(Path("runs/checkpoints/step_000004/trainer").absolute(), None)}
    assert timeout_s == 22.0


class MemoryOfNodes(trainer_group.SharedFolders):
    """Folders of which one node cannot be reached."""

    def fetched(self, node, folder):
        if node.name == "node1":
            raise NotWritten("node1 does not answer")


def test_what_keeps_ranks_from_loading_a_checkpoint_is_told_from_what_fails_beside_it(group, monkeypatch):
    checkpoint = Path("runs/checkpoints/step_000004")
    group._actors.failures["load_checkpoint"] = StageError("trainer 3: load_checkpoint: OSError: No space left")
    with pytest.raises(NotLoaded, match="No space left"):
        group.start(checkpoint)
    assert group.has_failed
    # Others start in their place.
    monkeypatch.setattr(trainer_group, "is_alive", lambda node: True)
    group._actors.names, group._actors.failures = [], {}
    group.restart(checkpoint)
    assert not group.has_failed
    group.folders = MemoryOfNodes()
    with pytest.raises(NotLoaded, match="node1 does not answer"):
        group.start(checkpoint)
    group.folders = trainer_group.SharedFolders()
    group._actors.failures["load_checkpoint"] = ActorLost("trainer 3: its process died")
    with pytest.raises(TrainerLost):
        group.start(checkpoint)

    def engine_fails() -> None:
        raise StageError("engine 0 has ended")

    group._actors.are_slow, group.meanwhile = True, engine_fails
    with pytest.raises(StageError, match="engine 0 has ended") as found:
        group.start(checkpoint)
    assert not isinstance(found.value, NotLoaded)


def test_each_rank_gets_its_share_of_every_update_at_once(group):
    updates = [batch_of_two_ranks(), batch_of_two_ranks()[::-1]]
    # Ranks may stand in any order.
    group._layouts = dict(reversed(group._layouts.items()))
    group.put_batches(updates)
    given, timeout_s = group._actors.last("put_batches")
    assert timeout_s == 22.0
    assert {name: share for name, (share,) in given.items()} == {
        f"trainer {rank}": [update[data_rank] for update in updates] for rank, data_rank in enumerate(DATA_RANKS)
    }


def test_reports_of_log_probs_come_back_in_the_order_of_the_data_parallel_ranks(group):
    """From whichever rank of each reports."""
    group._actors.answers["add_logprobs"] = lambda rank, *given: (
        [f"{DATA_RANKS[rank]}: {number}" for number in range(2)] if rank % 2 else None
    )
    group._layouts = dict(reversed(group._layouts.items()))
    found = group.gather(RankBatches.add_logprobs, 3, "old_logprobs", 0.7, routing=True)
    assert found == ["0: 0", "0: 1", "1: 0", "1: 1"]
    given, timeout_s = group._actors.last("add_logprobs")
    assert (set(given.values()), timeout_s) == ({(3, "old_logprobs", 0.7, True)}, 22.0)


def test_every_rank_makes_the_update_with_the_loss_of_the_recipe_and_the_same_denominator(group):
    group._recipe.algorithm.clip_high = 0.25
    group._actors.answers["accumulate"] = lambda rank, *given: [DATA_RANKS[rank]] if rank % 2 else None
    group._actors.answers["step"] = lambda rank: "the result"
    policy = loss_function("policy", group._recipe.algorithm, 0.5)
    found = group.gather(RankBatches.accumulate, 1, policy, denominator=4, temperature=0.7, logprobs=True)
    assert found == [0, 1]
    given, timeout_s = group._actors.last("accumulate")
    assert (len(given), timeout_s) == (4, 22.0)
    update, loss, *rest = given["trainer 2"]
    assert (update, rest) == (1, [4, 0.7, True])
    assert (loss.keywords["settings"].clip_high, loss.keywords["entropy_coef"]) == (0.25, 0.5)
    assert group.call(RankBatches.step) == "the result"
    assert len(group._actors.last("step")[0]) == 4


def test_the_report_of_a_resync_is_that_of_the_rank_that_makes_one(group):
    group._actors.answers["resync"] = lambda rank, version: f"version {version}" if rank == 2 else None
    assert group.resync(7) == "version 7"


def test_folders_reach_the_ranks_as_absolute_paths_and_the_checksums_of_all_ranks_come_back(group):
    group.begin_checkpoint(Path("runs/trainer"))
    digests = group.finish_checkpoint(Path("runs/trainer"))
    assert {name: digest.bytes for name, digest in digests.items()} == {f"__{rank}_0.distcp": rank for rank in range(4)}
    group.export_hf(Path("runs/export"))
    for method, path, *more in (
        ("begin_checkpoint", "runs/trainer", [True, False, False, False], [False] * 4),
        ("finish_checkpoint", "runs/trainer"),
        ("export_hf", "runs/export"),
    ):
        given, _ = group._actors.last(method)
        assert given == {f"trainer {rank}": (Path(path).absolute(), *(of[rank] for of in more)) for rank in range(4)}


def test_ranks_compare_a_share_of_a_checkpoints_files_each_before_any_is_loaded(monkeypatch, actor_class, tmp_path):
    sizes = (900, 5, 70, 80, 6, 7, 300, 400)
    newest = tmp_path / "step_000020"
    newest.mkdir()
    for number, size in enumerate(sizes):
        (newest / f"{number}").write_bytes(bytes(size))
    digests = file_digests(newest, map(str, range(len(sizes))))
    group = make(monkeypatch, "trainer")
    group._actors.answers["compare_files"] = lambda rank, root, files: differences(root, files, contents=True)
    group.start(newest, digests)
    given, timeout_s = group._actors.last("compare_files")
    assert timeout_s == 22.0
    shares = [set(files) for _, files in given.values()]
    # By size: 900 and 70 bytes, 400 and 7, 300 and 6, 80 and 5.
    assert shares == [{"0", "2"}, {"7", "5"}, {"6", "4"}, {"3", "1"}]
    assert [method for method, _ in group._actors.calls[-8:]] == [*4 * ["compare_files"], *4 * ["load_checkpoint"]]

    (newest / "7").write_bytes(bytes(399) + b"x")
    (newest / "4").unlink()
    before = CheckpointFolder(tmp_path)
    before.finish(before.begin(10), RunState(step=10), {})
    group = make(monkeypatch, "trainer")
    group._actors.answers["compare_files"] = lambda rank, root, files: differences(root, files, contents=True)
    said = (
        f"{newest} is damaged:\n  4: missing\n  7: its checksum differs\n"
        f"{tmp_path / 'step_000010'} has all of its files, which are compared when it is loaded."
    )
    with pytest.raises(StageError, match=re.escape(said)):
        group.start(newest, digests)
    assert "load_checkpoint" not in [method for method, _ in group._actors.calls]
