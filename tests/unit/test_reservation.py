"""What a run takes of a Ray ray_cluster, and how a cluster of its own begins and ends, with tables in place of Ray."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray.exceptions import GetTimeoutError

from slimrl.base.errors import StageError
from slimrl.config.env_vars import thread_variables
from slimrl.runtime.cluster import guard, ray_cluster, reservation
from slimrl.runtime.cluster.placement import Node, Placement, Slot
from slimrl.runtime.cluster.reservation import Reservation, cluster_nodes


def entry(node_id: str, host: str, *, alive: bool = True, **resources: float) -> dict:
    return {
        "NodeID": node_id, "NodeManagerHostname": host, "NodeManagerAddress": f"10.0.0.{ord(node_id[0])}",
        "Alive": alive, "Resources": resources,
    }  # fmt: skip


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch):
    def nodes(*entries: dict, mine: str = "m") -> None:
        context = SimpleNamespace(get_node_id=lambda: mine)
        monkeypatch.setattr(reservation.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(reservation.ray, "nodes", lambda: list(entries))

    return nodes


def test_the_drivers_node_comes_first_and_the_others_by_name(known):
    known(entry("z", "b", GPU=8), entry("y", "a", GPU=4, CPU=9), entry("m", "c", GPU=2), entry("x", "d", alive=False))
    nodes, resource = cluster_nodes(private=False)
    assert resource == "GPU"
    assert [(node.name, node.node_id, node.slots) for node in nodes] == [("c", "m", 2), ("a", "y", 4), ("b", "z", 8)]
    assert [node.address for node in nodes] == ["10.0.0.109", "10.0.0.121", "10.0.0.122"]


def test_slots_are_gpus_where_any_node_has_one_and_a_part_of_one_is_none(known):
    known(entry("m", "a", CPU=16), entry("n", "b", CPU=16, GPU=1))
    nodes, resource = cluster_nodes(private=False)
    assert (resource, [node.slots for node in nodes]) == ("GPU", [0, 1])
    known(entry("m", "a", CPU=16), entry("n", "b", CPU=4, GPU=0.5, alive=True))
    nodes, resource = cluster_nodes(private=True)
    assert (resource, [node.slots for node in nodes]) == ("CPU", [16, 4])
    assert {node.address for node in nodes} == {"127.0.0.1"}


def test_nodes_of_one_machine_have_names_of_their_own(known):
    known(entry("m" * 20, "a", CPU=1), entry("k" * 20, "a", CPU=1), entry("n", "b", CPU=1), mine="m" * 20)
    nodes, _ = cluster_nodes(private=True)
    assert [node.name for node in nodes] == ["a/mmmmmmmm", "a/kkkkkkkk", "b"]


A, B = (Node(node_id=name, name=f"host-{name}", address="", slots=2) for name in "ab")
SLOTS = [Slot(node=node, number=number) for node in (A, B) for number in range(2)]


@pytest.fixture
def ray_group(monkeypatch: pytest.MonkeyPatch):
    """A placement group that is granted; `asked` has what was reserved, GPUs are numbered from 40."""
    made = SimpleNamespace(asked=[], granted=True, waited=[], gpus=[], lost=None)

    def placement_group(bundles, *, bundle_label_selector):
        made.asked.append((bundles, bundle_label_selector))
        return SimpleNamespace(wait=lambda seconds: made.waited.append(seconds) or made.granted)

    def options(*, num_cpus, num_gpus, scheduling_strategy):
        assert (num_cpus, num_gpus) == (0, 1)
        return SimpleNamespace(
            remote=lambda: made.gpus.append(scheduling_strategy[1]) or str(40 + scheduling_strategy[1])
        )

    def get(refs, timeout):
        assert timeout == reservation.RESERVE_TIMEOUT_S
        if made.lost is not None:
            raise made.lost
        return refs

    monkeypatch.setattr(reservation, "placement_group", placement_group)
    monkeypatch.setattr(
        reservation,
        "PlacementGroupSchedulingStrategy",
        lambda group, *, placement_group_bundle_index: (group, placement_group_bundle_index),
    )
    monkeypatch.setattr(reservation, "_gpu_id", SimpleNamespace(options=options))
    monkeypatch.setattr(reservation.ray, "get", get)
    monkeypatch.setattr(reservation.ray, "available_resources", lambda: {"GPU": 3.0})
    return made


def test_each_slot_is_a_bundle_of_its_node_and_a_process_asks_for_its_share(ray_group):
    placement = Placement(ranks=tuple(SLOTS[:3]), engines=((SLOTS[0],), (SLOTS[3],), (SLOTS[0],)))
    taken = Reservation(placement, "CPU")
    ((bundles, labels),) = ray_group.asked
    assert bundles == [{"CPU": 1}] * 4
    assert labels == [{"ray.io/node-id": node} for node in "aabb"]
    assert ray_group.waited == [reservation.RESERVE_TIMEOUT_S]
    options = taken.options(SLOTS[0], thread_variables(3))
    # Three processes share it, in thousandths rounded down.
    assert (options["num_cpus"], options["num_gpus"]) == (0.333, 0)
    assert options["scheduling_strategy"][1] == 0
    assert options["runtime_env"] == {"env_vars": {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}}
    alone = Reservation(placement, "GPU").options(SLOTS[3], {})
    assert (alone["num_cpus"], alone["num_gpus"], alone["scheduling_strategy"][1]) == (0, 1.0, 3)
    assert taken.devices(tuple(SLOTS)) == ()
    assert ray_group.gpus == []


def test_engines_of_several_gpus_are_told_which_and_others_see_their_own(ray_group):
    placement = Placement(ranks=(SLOTS[0],), engines=((SLOTS[1],), (SLOTS[2], SLOTS[3])))
    taken = Reservation(placement, "GPU")
    assert ray_group.gpus == [2, 3]
    assert taken.devices((SLOTS[2], SLOTS[3])) == ("42", "43")
    assert taken.devices((SLOTS[1],)) == ()
    assert Reservation(placement, "CPU").devices((SLOTS[2], SLOTS[3])) == ()
    ray_group.lost = GetTimeoutError("late")
    with pytest.raises(StageError, match="cannot find out the GPU ids of the engines: GetTimeoutError"):
        Reservation(placement, "GPU")


def test_a_cluster_in_use_is_refused_with_what_is_free(ray_group):
    ray_group.granted = False
    with pytest.raises(StageError, match="needs 2 GPUs, and 3 were free for 60 s"):
        Reservation(Placement(ranks=tuple(SLOTS[:2]), engines=()), "GPU")


@pytest.fixture
def ray_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Ray that notes how it is started, in a system whose temporary folder is a test's."""
    made = SimpleNamespace(journal=[], fails=None, environment={}, watched=[])
    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    monkeypatch.setattr(ray_cluster, "watching_head", lambda address: made.watched.append(address) or nullcontext())
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_cluster, "_MAX_SOCKET_BYTES", 1000)
    for name in (
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
    ):
        monkeypatch.setenv(name, "before")
    # Ray's own code reads this one in the test's process, and ends it where it finds no number.
    monkeypatch.setenv("RAY_worker_niceness", "7")

    def init(**given):
        made.environment = dict(os.environ)
        made.journal.append(("init", given))
        if made.fails is not None:
            raise made.fails

    @contextmanager
    def guarded(folder, temporary_files):
        made.journal.append(("guard", folder, temporary_files))
        yield
        made.journal.append("guard ends")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: made.journal.append("shutdown"))
    monkeypatch.setattr(ray_cluster, "guarded", guarded)
    return made


def test_a_run_without_an_address_has_a_cluster_and_a_temporary_folder_that_go_with_it(ray_start, tmp_path: Path):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "RAY_worker_niceness"):
        os.environ.pop(name)
    dead = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    # The last one is a job's, whose number is no process's.
    names = (f"slimrl-run-{os.getppid()}-a", "slimrl-run-x-a", "other", f"slimrl-ray-{dead}-a")
    kept = [tmp_path / name for name in names]
    left = tmp_path / f"slimrl-run-{dead}-a"
    for path in (*kept, left):
        (path / "deep").mkdir(parents=True)
    with ray_cluster.ray_cluster(None, num_slots=5):
        assert not left.exists()
        (folder,) = tmp_path.glob(f"slimrl-run-{os.getpid()}-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        token = (folder / "token").read_text()
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        assert len(token) == 64
        assert os.environ["TMPDIR"] == "before"
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    guarding, (_, given), *rest = ray_start.journal
    assert guarding == ("guard", folder, folder / "tmp")
    assert rest == ["shutdown", "guard ends"]
    chosen = {"address": "local", "num_cpus": 5, "include_dashboard": False, "log_to_driver": False}
    assert {**given, **chosen, "_temp_dir": str(folder / "ray")} == given
    assert ray_start.environment["TMPDIR"] == str(folder / "tmp")
    assert ray_start.environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / f"slimrl-compiled-{os.getuid()}")
    assert ray_start.environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert ray_start.environment["RAY_worker_niceness"] == "0"
    assert "RAY_worker_niceness" not in os.environ
    assert ray_start.environment["RAY_AUTH_MODE"] == "token"
    assert ray_start.environment["RAY_AUTH_TOKEN_PATH"] == str(folder / "token")
    assert "RAY_AUTH_TOKEN" not in ray_start.environment
    assert ray_start.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("before", "before")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / f"slimrl-compiled-{os.getuid()}"])


@pytest.mark.parametrize(("length", "stays"), [(11, True), (24, False), (70, False)])
def test_the_sockets_of_a_cluster_have_paths_that_the_kernel_takes(ray_start, monkeypatch, length: int, stays: bool):
    monkeypatch.undo()
    given = {}
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **named: given.update(named))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_cluster, "guarded", lambda *_: nullcontext())
    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    monkeypatch.setattr(ray_cluster, "watching_head", lambda _: nullcontext())
    outer = Path("/tmp") / f"t{os.getpid()}".ljust(length - len("/tmp/"), "x")
    outer.mkdir()
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(outer))
    try:
        with ray_cluster.ray_cluster(None, num_slots=1):
            socket_path = f"{given['_temp_dir']}/session_2026-11-27_10-16-56_123456_{os.getpid()}/sockets/plasma_store"
            assert len(socket_path) <= 107
            assert (Path(given["_temp_dir"]).parent.parent == outer) == stays
    finally:
        shutil.rmtree(outer)


def test_a_folder_of_an_ended_run_that_another_start_removes_first_is_no_error(ray_start, monkeypatch, tmp_path: Path):
    dead = next(pid for pid in range(2**22 - 1, 0, -1) if not psutil.pid_exists(pid))
    left = tmp_path / f"slimrl-run-{dead}-a"
    left.mkdir()
    monkeypatch.setattr(ray_cluster.psutil, "pid_exists", lambda _: left.rmdir())
    with ray_cluster.ray_cluster(None, num_slots=1):
        assert not left.exists()


def test_compiled_kernels_that_somebody_else_may_have_put_there_are_not_loaded(ray_start, tmp_path: Path):
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    theirs = tmp_path / f"slimrl-compiled-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    with ray_cluster.ray_cluster(None, num_slots=1):
        (folder,) = tmp_path.glob("slimrl-run-*")
    assert ray_start.environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "compiled")
    assert ray_start.environment["RAY_worker_niceness"] == "7"
    theirs.rmdir()
    for target in (tmp_path, tmp_path / "gone"):
        theirs.symlink_to(target)
        with ray_cluster.ray_cluster(None, num_slots=1):
            (folder,) = tmp_path.glob("slimrl-run-*")
        assert ray_start.environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "compiled")
        theirs.unlink()


def test_a_cluster_that_does_not_start_leaves_nothing_and_a_cache_that_is_set_is_used(ray_start, tmp_path: Path):
    ray_start.fails = RuntimeError("no port")
    with pytest.raises(StageError, match="Ray did not start: no port"), ray_cluster.ray_cluster(None, num_slots=1):
        raise AssertionError
    assert ray_start.environment["TORCHINDUCTOR_CACHE_DIR"] == "before"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"
    assert ray_start.journal[-1] == "shutdown"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("late", "starts"), [(1, True), (2, True), (3, False)])
def test_ray_that_gives_up_on_its_own_start_is_started_again_without_what_it_left(
    ray_start, monkeypatch, late: int, starts: bool
):
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(ray_cluster, "time", clock)
    init = ray_cluster.ray.init

    def late_init(**given):
        init(**given)
        if sum(entry[0] == "init" for entry in ray_start.journal) <= late:
            clock.now_s += 31
            raise Exception("The current node timed out")

    def end_members(folder, temporary_files, *, grace_s):
        ray_start.journal.append(("ended", folder, temporary_files, grace_s))

    monkeypatch.setattr(ray_cluster.ray, "init", late_init)
    monkeypatch.setattr(ray_cluster, "end_members", end_members)
    if starts:
        with ray_cluster.ray_cluster(None, num_slots=1):
            pass
    else:
        with pytest.raises(StageError, match="Ray did not start: The current node"):
            ray_cluster.ray_cluster(None, num_slots=1).__enter__()
    tries = [entry for entry in ray_start.journal if entry[0] in ("init", "ended")]
    assert [entry[0] for entry in tries] == ["init", "ended"] * min(late, 3) + ["init"] * starts
    ended = {entry[1:] for entry in tries if entry[0] == "ended"}
    assert len(ended) == 1
    ((folder, temporary_files, grace_s),) = ended
    assert folder.name.startswith(f"slimrl-run-{os.getpid()}-")
    assert (temporary_files, grace_s) == (folder / "tmp", 0.0)


@pytest.mark.parametrize("ends", [True, False], ids=["raylet ends", "raylet stays"])
def test_what_ray_started_beside_the_raylet_is_killed_when_that_has_ended_and_not_before(
    ray_start, monkeypatch, tmp_path: Path, ends: bool
):
    programs = tmp_path / "ray"
    programs.mkdir()
    for name in ("raylet", "gcs_server"):
        shutil.copy(shutil.which("sleep") or "", programs / name)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    (programs / "monitor.py").write_text(stubborn)
    commands = {
        "raylet": [str(programs / "raylet"), "60"],
        "gcs_server": [str(programs / "gcs_server"), "60"],
        "monitor": [sys.executable, str(programs / "monitor.py")],
        "another": ["sleep", "60"],
    }
    running = {name: subprocess.Popen(command) for name, command in commands.items()}

    def shutdown() -> None:
        time.sleep(0.5)
        assert [process.poll() for process in running.values()] == [None] * 4
        if not ends:
            return
        running["raylet"].terminate()
        ray_start.journal.append([running[name].wait(10) for name in ("raylet", "gcs_server", "monitor")])

    monkeypatch.setattr(ray_cluster.ray, "shutdown", shutdown)
    monkeypatch.setattr(ray_cluster.ray, "__file__", str(programs / "__init__.py"))
    if not ends:
        monkeypatch.setattr(ray_cluster, "RAYLET_ENDS_S", 0.7)
    try:
        with ray_cluster.ray_cluster(None, num_slots=1):
            pass
        if ends:
            assert ray_start.journal[-2][1:] == [-signal.SIGKILL] * 2
            assert running["another"].poll() is None
        else:
            assert [process.poll() for process in running.values()] == [None] * 4
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_a_run_joins_the_cluster_at_its_address_and_leaves_it(ray_start, tmp_path: Path):
    with ray_cluster.ray_cluster("head:6379", num_slots=5):
        assert list(tmp_path.iterdir()) == []
    (_, given), last = ray_start.journal
    assert (given["address"], given["log_to_driver"], last) == ("head:6379", False, "shutdown")
    assert ray_start.watched == ["head:6379"]
    assert "num_cpus" not in given
    ray_start.fails = ConnectionError("refused")
    with pytest.raises(StageError, match=r"no Ray cluster answers at head:6379: refused"):
        ray_cluster.ray_cluster("head:6379", num_slots=5).__enter__()
    assert ray_start.journal[-1] == "shutdown"


class Process:
    def __init__(
        self, pid: int, tmpdir: str | None, *files: tuple[Path, str], zombie: bool = False, stubborn: bool = False
    ) -> None:
        self.pid, self.tmpdir, self.files, self.zombie, self.stubborn = pid, tmpdir, files, zombie, stubborn
        self.killed = False

    def environ(self) -> dict[str, str]:
        if self.tmpdir == "hidden":
            raise psutil.AccessDenied(self.pid)
        return {} if self.tmpdir is None else {"TMPDIR": self.tmpdir}

    def open_files(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(path=str(path), mode=mode) for path, mode in self.files]

    def status(self) -> str:
        return psutil.STATUS_ZOMBIE if self.zombie else psutil.STATUS_SLEEPING

    def num_threads(self) -> int:
        return 1

    def is_running(self) -> bool:
        return True

    def send_signal(self, number: signal.Signals) -> None:
        self.killed = number is signal.SIGKILL
        if not self.stubborn:
            raise psutil.NoSuchProcess(self.pid)


def test_what_is_left_of_a_killed_drivers_cluster_is_ended_after_a_while_and_its_folder_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    inside = str(tmp_path / "tmp")
    log = tmp_path / "session" / "agent.log"
    # The second one is known by what it writes: its title has overwritten its environment.
    first, second = Process(1, inside), Process(2, None, (Path("/tmp/x"), "w"), (log, "a"), stubborn=True)
    others = [Process(3, "/tmp", (Path(f"{tmp_path}-2/x"), "w")), Process(4, None, (log, "r")), Process(5, "hidden")]
    others += [Process(6, inside, zombie=True)]
    others.append(Process(os.getpid(), inside))
    clock, cleaned = SimpleNamespace(now=0.0), []

    def alive():
        # The first one has gone once it was killed; the second one never does.
        return [p for p in (*others, first, second) if p is not first or not p.killed]

    def sleep(seconds: float) -> None:
        assert not (first.killed and clock.now < guard.GRACE_S)
        clock.now += seconds

    monkeypatch.setattr(guard.psutil, "process_iter", alive)
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr("slimrl.resync.ipc.stale_files.clean_stale_segments", lambda: cleaned.append(True))
    assert guard.members(tmp_path, tmp_path / "tmp") == [first, second]
    (link := tmp_path.with_name(f"{tmp_path.name}-link")).symlink_to(tmp_path)
    assert guard.members(link, tmp_path / "tmp") == [first, second]
    (tmp_path / "tmp").mkdir()
    guard.end_what_is_left(tmp_path, tmp_path / "tmp")
    assert (first.killed, second.killed) == (True, True)
    assert not any(process.killed for process in others)
    assert clock.now == pytest.approx(guard.GRACE_S + guard.END_TIMEOUT_S, abs=0.5)
    assert cleaned == [True]
    assert not tmp_path.exists()
    # Where all end by themselves nobody waits.
    clock.now = 0.0
    monkeypatch.setattr(guard.psutil, "process_iter", lambda: others)
    guard.end_what_is_left(tmp_path, tmp_path / "tmp")
    assert clock.now == 0.0


def test_a_guard_is_apart_from_the_terminal_and_ends_with_the_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    journal = []

    def begin(command, **how):
        journal.append((command, how))
        return SimpleNamespace(kill=lambda: journal.append("kill"), wait=lambda seconds: journal.append(seconds))

    monkeypatch.setattr(guard.subprocess, "Popen", begin)

    def guard_it(failure) -> None:
        with guard.guarded(tmp_path, tmp_path / "tmp"):
            assert len(journal) == 1
            if failure is not None:
                raise failure

    for failure in (None, ValueError("x")):
        journal.clear()
        with nullcontext() if failure is None else pytest.raises(ValueError, match="x"):
            guard_it(failure)
        (command, how), *end = journal
        assert command[1:] == [
            "-m",
            "slimrl.runtime.cluster.guard",
            str(os.getpid()),
            str(tmp_path),
            str(tmp_path / "tmp"),
        ]
        assert how["start_new_session"] is True
        assert {how["stdin"], how["stdout"], how["stderr"]} == {subprocess.DEVNULL}
        assert end == ["kill", guard.END_TIMEOUT_S]
