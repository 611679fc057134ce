"""What each command starts, gives to its parts and leaves behind; the parts are stand-ins that note it."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import Preempted, RunError, StageError
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.data import TruncationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import Status
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.report import ResyncReport
from slimrl.rollout.pressure import CachePressure
from slimrl.runtime import commands, start, training
from slimrl.runtime import loop as loops
from slimrl.runtime.cluster.actors import run
from slimrl.runtime.cluster.processes import Processes
from slimrl.runtime.cluster.rank_position import RankProgress
from slimrl.runtime.cluster.trainer_actor import TrainerActor
from slimrl.runtime.resync_tools import resync_bench
from slimrl.runtime.state import RunState

PROMPTS = [Prompt(prompt_id=str(i), messages=[], label=None) for i in range(7)]


class Parts:
    """Engines, trainer, stage and terminal at once; `noted` has what was asked of them."""

    layout = None
    num_replaced = 0
    pressure = CachePressure(RolloutConfig(), lambda: ())

    def __init__(self, tmp_path: Path) -> None:
        self.recipe = Recipe(steps=4)
        self.recipe.run.dir, self.recipe.run.name = str(tmp_path / "runs"), "run"
        self.recipe.trainer.updates_per_rollout, self.recipe.rollout.prompts_per_step = 3, 2
        self.recipe.data.shuffle = False
        self.folder = RunFolder(tmp_path / "runs" / "run")
        self.noted: list[tuple] = []
        self.started: dict = {}
        self.prepared: tuple = ()
        self.opened: dict = {}
        self.said: list[str] = []
        self.total_steps = None
        self.keep = None
        self.failing = None

    def say(self, text):
        self.said.append(text)

    @contextmanager
    def stage(self, name):
        yield

    @contextmanager
    def part(self, name):
        yield

    step = part

    @contextmanager
    def phase(self, name, total, unit):
        yield SimpleNamespace(update=lambda done, total: None)

    def summary(self, step, metrics):
        self.noted.append(("summary", step))

    def export_hf(self, out):
        self.noted.append(("export", out))

    def log(self, step, metrics):
        self.noted.append(("log", step, set(metrics) - {"time/step_s"}))

    @contextmanager
    def showing(self, live):
        self.noted.append("showing")
        yield

    def rollout(self, prompts, *, label):
        self.noted.append(("rollout", [prompt.prompt_id for prompt in prompts], label))
        return ["a", "b"]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parts:
    made = Parts(tmp_path)
    task = SimpleNamespace(
        train={"train": PROMPTS}, eval_sets={}, group_filters=["filter"],
        notes=[], rewards=SimpleNamespace(parts=()),
    )  # fmt: skip

    @contextmanager
    def progress(total_steps):
        made.total_steps = total_steps
        yield made

    def prepare(path, overrides, command, progress, read, **more):
        made.prepared = (list(overrides), command, getattr(read, "keywords", read), more)
        return SimpleNamespace(recipe=made.recipe), task

    @contextmanager
    def open_run(loaded, progress, **how):
        made.opened = how
        yield made.folder

    @contextmanager
    def started(recipe, folder, progress, **how):
        made.started = how
        teachers = "teachers" if how.get("with_teacher") else None
        past = "past" if how.get("with_past") else None
        critics = "critics" if how.get("with_critic") else None
        engines = made if how.get("with_engines") else None
        yield Processes(engines=engines, trainers=made, teachers=teachers, past=past, critics=critics)

    def logs_of_command(directory, command, loaded):
        made.noted.append(("logs", directory, command))
        return made.folder

    @contextmanager
    def rollout_stage(loaded, task, processes, progress):
        made.teachers, made.past = processes.teachers, processes.past
        yield made

    @contextmanager
    def trackers(folder, tracking, resolved, *, keep_through_step, say):
        made.keep = keep_through_step
        yield made

    for name, value in {
        "Progress": progress, "prepare": prepare, "open_run": open_run, "started": started,
        "logs_of_command": logs_of_command, "rollout_stage": rollout_stage, "Trackers": trackers,
        "resolved_dict": lambda loaded: {},
    }.items():  # fmt: skip
        monkeypatch.setattr(commands, name, value)
    return made


DIGESTS = {"trainer/__0_0.distcp": "digest"}
HOW = {"resume": None, "overwrite": True, "job": "7", "checkpoint_log": Path("log")}


def checkpointed(
    monkeypatch, parts: Parts, step: int | None, *, has_checksums: bool = True, reads: bool = True
) -> Path:
    """The folder has a checkpoint of this step, or none."""
    path = parts.folder.checkpoints / f"step_{step or 0:06d}"
    path.mkdir(parents=True)
    sampler = Sampler(PROMPTS, seed=parts.recipe.seed, shuffle=False)
    sampler.take(3)
    state = RunState(step=step or 0, cursor=sampler.state())
    found = None if step is None else SimpleNamespace(path=path, state=state, has_checksums=has_checksums)

    def resume_point(folder, recipe, *, contents, seen):
        # On a cluster the ranks read the files, by their digests.
        assert contents is reads
        seen(1, 2)
        return found

    monkeypatch.setattr(training, "resume_point", resume_point)
    monkeypatch.setattr(commands, "read_state", lambda checkpoint: (state, DIGESTS))
    return path


def test_a_fresh_run_trains_from_the_first_prompt_for_all_its_updates(parts: Parts, monkeypatch):
    runs = []

    def loop(run):
        runs.append((run.state.step, [p.prompt_id for p in run.data.take(2)], run.critics))
        run.state.step = 4

    monkeypatch.setattr(training, "train", loop)
    commands.train(Path("r.yaml"), ["a=1"], **HOW, ray_address="head:1")
    assert runs == [(0, ["0", "1"], "critics")]
    assert parts.prepared == (["a=1"], "train", {"train": True, "evaluate": True}, {"ray_address": "head:1"})
    assert parts.opened == HOW
    assert parts.started == {
        "with_engines": True, "with_teacher": True, "with_past": True, "with_critic": True, "may_restart": True,
        "total_updates": 12, "checkpoint": None, "files": None, "ray_address": "head:1",
    }  # fmt: skip
    assert parts.teachers == "teachers"
    assert (parts.keep, parts.total_steps) == (-1, 4)
    assert not parts.folder.requeue.exists()


@pytest.mark.parametrize(("step", "has_checksums"), [(2, True), (2, False), (None, True)])
def test_a_resumed_run_goes_on_with_its_state_and_says_from_where(parts: Parts, monkeypatch, step, has_checksums):
    path = checkpointed(monkeypatch, parts, step, has_checksums=has_checksums)
    runs = []
    monkeypatch.setattr(
        training, "train", lambda run: runs.append((run.state.step, [p.prompt_id for p in run.data.take(2)]))
    )
    with pytest.raises(Preempted, match=f"after step {step or 0} of 4"):
        commands.train(Path("r.yaml"), [], **HOW, ray_address=None)
    if step is None:
        assert (runs, parts.started["checkpoint"], parts.keep, parts.said) == ([(0, ["0", "1"])], None, -1, [])
        return
    assert runs == [(2, ["3", "4"])]
    assert (parts.started["checkpoint"], parts.keep) == (path, 2)
    taken = [] if has_checksums else [f"{path} has no checksums: its files are not checked"]
    assert parts.said == [*taken, f"continuing after step 2 of 4, from {path}"]


def test_a_run_continues_with_the_critic_that_its_checkpoint_has_or_without_one(parts: Parts, monkeypatch):
    path = checkpointed(monkeypatch, parts, 2)
    parts.recipe.algorithm.advantage = "gae"
    monkeypatch.setattr(training, "train", lambda run: None)
    with pytest.raises(ValueError, match=r"step_000002 has no critic, as its run had none\. Give that run's export"):
        commands.train(Path("r.yaml"), [], **HOW, ray_address=None)
    assert parts.started == {}
    (path / "critic").mkdir()
    with pytest.raises(Preempted):
        commands.train(Path("r.yaml"), [], **HOW, ray_address=None)
    assert parts.started["checkpoint"] == path
    parts.recipe.algorithm.advantage = "grpo"
    with pytest.raises(ValueError, match=r"step_000002 has a critic, which would be dropped\."):
        commands.train(Path("r.yaml"), [], **HOW, ray_address=None)


def test_a_checkpoint_of_a_file_with_another_number_of_lines_is_refused(parts: Parts, monkeypatch):
    checkpointed(monkeypatch, parts, 2)
    monkeypatch.setattr(training, "train", lambda run: pytest.fail("it trains"))
    monkeypatch.setattr("test_commands.PROMPTS", PROMPTS)
    parts.recipe.data.train = "data.jsonl"
    other = SimpleNamespace(
        train={"train": PROMPTS[:5]}, eval_sets={}, group_filters=[], notes=[], rewards=SimpleNamespace(parts=())
    )
    monkeypatch.setattr(commands, "prepare", lambda *_, **__: (SimpleNamespace(recipe=parts.recipe), other))
    with pytest.raises(ValueError, match=r"^data\.train = data\.jsonl: "):
        commands.train(Path("r.yaml"), [], **HOW, ray_address=None)


def test_supervised_training_starts_no_engine_and_makes_one_update_a_step(parts: Parts, monkeypatch):
    path = checkpointed(monkeypatch, parts, 2, reads=False)
    given, addresses = [], []

    def loop(run, sampler):
        given.append((run.state.step, [p.prompt_id for p in sampler.take(1)], run.should_continue))
        run.state.step = 4

    monkeypatch.setattr(
        commands,
        "prepare",
        lambda path, overrides, command, progress, read, *, ray_address: (
            addresses.append(ray_address) or SimpleNamespace(recipe=parts.recipe),
            {"train": PROMPTS},
        ),
    )
    monkeypatch.setattr(training, "train_on_conversations", loop)
    commands.sft(Path("r.yaml"), [], **HOW, ray_address="head:1")
    assert addresses == ["head:1"]
    assert given == [(2, ["3"], True)]
    assert parts.opened == HOW
    assert parts.started == {
        "with_engines": False, "with_teacher": False, "with_past": False, "with_critic": False, "may_restart": True,
        "total_updates": 4, "checkpoint": path, "files": DIGESTS, "ray_address": "head:1",
    }  # fmt: skip
    assert (parts.keep, parts.total_steps) == (2, 4)


def on_file(status: Status, teacher: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(status=status, segments=[SimpleNamespace(teacher_logprobs=teacher)])


def test_training_on_a_file_toward_a_teacher_needs_its_log_probs_of_all_that_is_trained_on(parts: Parts, monkeypatch):
    parts.recipe.algorithm.teacher_coef = 0.5
    monkeypatch.setattr(commands, "shape_rewards", lambda *_: pytest.fail("it goes on"))
    monkeypatch.setattr(commands, "read_hf_config", lambda folder: {"vocab_size": 100})
    whole = [on_file(Status.completed, -1.0), on_file(Status.failed)]
    for batch, said in ((whole, "it goes on"), ([*whole, on_file(Status.truncated)], "needs the log-probs of a teach")):
        monkeypatch.setattr(commands, "read_trajectories", lambda path, vocab_size, batch=batch: batch)
        with pytest.raises((ValueError, pytest.fail.Exception), match=said):
            commands.train_on_file(
                Path("r.yaml"), [], trajectories=Path("t.jsonl"), steps=2, overwrite=True, ray_address=None
            )
    assert parts.started == {}


def test_training_on_a_file_takes_the_same_trajectories_each_step_and_limits_the_first_mismatch_alone(
    parts: Parts, monkeypatch
):
    learned = []

    class Learner:
        def __init__(self, recipe, trainers, state, critics, *, say, folder) -> None:
            assert (state.step, critics, say.__name__) == (0, "critics", "say")

        def prepare(self, step, selection):
            learned.append(("prepare", step.number, selection))
            return "updates"

        def compute_inputs(self, step, updates):
            learned.append(("inputs", updates))

        def train(self, step, updates, *, enforce_limit):
            learned.append(("train", updates, enforce_limit))

    batch = [on_file(Status.completed)]
    ruled = []
    monkeypatch.setattr(commands, "Learner", Learner)
    monkeypatch.setattr(commands, "GroupFilters", lambda names, filters: filters)
    monkeypatch.setattr(loops, "select", lambda batch, algorithm, keeps, step: (batch, keeps, step))
    monkeypatch.setattr(commands, "read_trajectories", lambda path, vocab_size: batch)
    monkeypatch.setattr(commands, "read_hf_config", lambda folder: {"vocab_size": 100})
    monkeypatch.setattr(commands, "shape_rewards", lambda *given: ruled.append(given))
    parts.recipe.algorithm.truncated = TruncationMode.zero
    # As the command line over the recipe says.
    parts.recipe.steps = 2
    commands.train_on_file(
        Path("r.yaml"), ["a=1"], trajectories=Path("t.jsonl"), steps=2, overwrite=True, ray_address="head:1"
    )
    assert learned == [
        ("prepare", 1, (batch, ["filter"], 1)), ("inputs", "updates"), ("train", "updates", True),
        ("prepare", 2, (batch, ["filter"], 2)), ("inputs", "updates"), ("train", "updates", False),
    ]  # fmt: skip
    assert ruled == [(batch, parts.recipe.algorithm)]
    read = {"train": False, "evaluate": False}
    assert parts.prepared == (["a=1", "steps=2"], "train --trajectories", read, {"ray_address": "head:1"})
    assert (parts.opened, parts.keep) == ({"overwrite": True}, -1)
    assert parts.started == {"with_critic": True, "total_updates": 6, "ray_address": "head:1"}
    timed = {"time/logprobs_s", "time/train_s", "time/other_s"}
    assert parts.noted == [
        ("log", 1, timed), ("summary", 1), ("log", 2, timed), ("summary", 2), ("export", parts.folder.export),
    ]  # fmt: skip


def test_a_rollout_writes_the_first_steps_trajectories_and_overwrites_nothing(
    parts: Parts, tmp_path: Path, monkeypatch
):
    written = []
    monkeypatch.setattr(commands, "write_trajectories", lambda path, batch: written.append((path, batch)))
    out = tmp_path / "deep" / "t.jsonl"
    commands.rollout(Path("r.yaml"), [], out=out, conversations=None, min_reward=1.0, ray_address="head:1")
    assert written == [(out, ["a", "b"])]
    assert out.parent.is_dir()
    assert parts.prepared[1:] == ("rollout", {"train": True, "evaluate": False}, {"ray_address": "head:1"})
    assert parts.started == {"with_engines": True, "with_teacher": True, "with_past": True, "ray_address": "head:1"}
    assert parts.teachers == "teachers"
    assert parts.noted[-1] == ("rollout", ["0", "1"], "step_000001")
    out.touch()
    with pytest.raises(ValueError, match="exists; remove it or give another --out"):
        commands.rollout(Path("r.yaml"), [], out=out, conversations=None, min_reward=1.0, ray_address=None)


def test_an_export_checks_the_checkpoint_before_anything_starts(parts: Parts, tmp_path: Path, monkeypatch):
    checkpoint, out = tmp_path / "step_000002", tmp_path / "out"
    checked = []
    monkeypatch.setattr(commands, "check_exported", lambda path, seen: checked.append(path))
    monkeypatch.setattr(commands, "check_checkpoint_model", lambda path, recipe: checked.append((path, recipe)))
    with pytest.raises(ValueError, match="not a checkpoint of a run"):
        commands.export(Path("r.yaml"), [], checkpoint=checkpoint, out=out, ray_address=None)
    (checkpoint / "trainer").mkdir(parents=True)
    commands.export(Path("r.yaml"), [], checkpoint=checkpoint, out=out, ray_address="head:1")
    assert checked == [checkpoint, (checkpoint, parts.recipe)]
    assert parts.started == {"total_updates": 12, "checkpoint": checkpoint, "ray_address": "head:1"}
    assert parts.prepared[3] == {"ray_address": "head:1"}
    assert parts.noted[-1] == ("export", out)
    out.mkdir()
    with pytest.raises(ValueError, match="an export never overwrites"):
        commands.export(Path("r.yaml"), [], checkpoint=checkpoint, out=out, ray_address=None)


@pytest.mark.parametrize("routed", [True, False])
def test_the_client_of_a_rollout_knows_the_models_sizes(monkeypatch, routed: bool):
    config = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "vocab_size": 50}
    made = []
    monkeypatch.setattr(start, "read_hf_config", lambda path: config)
    monkeypatch.setattr(start, "RolloutStage", lambda *given, **named: made.append((given, named)))
    watched = []
    engines = SimpleNamespace(
        client=lambda **sizes: sizes, watch=lambda: watched.append("engines"), flush_caches="flush", key="k"
    )
    recipe = Recipe()
    recipe.rollout.routed_experts = routed
    loaded = LoadedRecipe(recipe=recipe, provenance={}, path="r.yaml", command="rollout")
    progress = Progress(0)
    start.rollout_stage(loaded, "task", Processes(engines=engines, trainers=None), progress)
    ((_, task, client, of_stage), named) = made[0]
    assert client == {"vocab_size": 50, "routed_experts_shape": (3, 2) if routed else None}
    assert (task, of_stage, named["flush_caches"], named["teacher"]) == ("task", progress, "flush", None)
    named["watch"]()
    assert watched == ["engines"]


def test_a_teacher_is_on_the_engines_that_the_run_started_or_on_servers_of_others(monkeypatch):
    made, connected, watched = [], [], []
    monkeypatch.setattr(start, "read_hf_config", lambda path: {"vocab_size": 50})
    monkeypatch.setattr(start, "RolloutStage", lambda *given, **named: made.append(named))
    monkeypatch.setattr(start, "SglangEngine", lambda url, **how: connected.append((url, how)))
    engines = SimpleNamespace(
        client=lambda **_: None, watch=lambda: watched.append("engines"), flush_caches=None, key="k"
    )
    teachers = SimpleNamespace(
        addresses=[SimpleNamespace(url="http://a"), SimpleNamespace(url="http://b")],
        watch=lambda: watched.append("teachers"),
        key="own",
    )
    recipe = Recipe()
    recipe.teacher.path = "teacher"
    loaded = LoadedRecipe(recipe=recipe, provenance={}, path="r.yaml", command="rollout")
    start.rollout_stage(loaded, "task", Processes(engines=engines, trainers=None, teachers=teachers), Progress(0))
    assert connected == [(url, {"key": "own", "vocab_size": 50}) for url in ("http://a", "http://b")]
    made[0]["watch"]()
    assert watched == ["engines", "teachers"]
    recipe.teacher.path, recipe.teacher.urls = "", ["http://c/"]
    start.rollout_stage(loaded, "task", Processes(engines=engines, trainers=None), Progress(0))
    assert connected[2:] == [("http://c", {"key": None, "vocab_size": 50})]
    assert made[1]["teacher"]._slots.qsize() == recipe.teacher.max_concurrency_per_engine
    # Alone in its batch, a segment has the same score each time.
    recipe.deterministic = True
    start.rollout_stage(loaded, "task", Processes(engines=engines, trainers=None, teachers=teachers), Progress(0))
    assert made[2]["teacher"]._slots.qsize() == len(teachers.addresses)


@pytest.mark.parametrize("deterministic", [True, False])
def test_older_versions_have_a_client_of_their_own_with_one_request_at_a_time_where_a_run_must_repeat(
    monkeypatch, deterministic: bool
):
    made, watched = [], []
    monkeypatch.setattr(start, "read_hf_config", lambda path: {"vocab_size": 50})
    monkeypatch.setattr(start, "RolloutStage", lambda *given, **named: made.append(named))
    monkeypatch.setattr(start, "SglangEngine", lambda url, **how: (url, how))
    engines = SimpleNamespace(client=lambda **_: None, watch=lambda: None, flush_caches=None, key="k")
    past = SimpleNamespace(
        client=lambda **sizes: sizes,
        watch=lambda: watched.append("past"),
        addresses=[SimpleNamespace(url="http://a")],
        key="own",
    )
    recipe = Recipe()
    recipe.deterministic = deterministic
    loaded = LoadedRecipe(recipe=recipe, provenance={}, path="r.yaml", command="train")
    start.rollout_stage(loaded, "task", Processes(engines=engines, trainers=None, past=past), Progress(0))
    client = made[0]["past"]
    if deterministic:
        assert client._engines == [("http://a", {"key": "own", "vocab_size": 50})]
    else:
        assert client == {"vocab_size": 50, "routed_experts_shape": None}
    made[0]["watch"]()
    assert watched == ["past"]


def test_an_engine_that_ended_is_the_cause_of_what_failed_after_it():
    def check():
        raise StageError("engine 1 was ended by SIGKILL")

    error = RunError("trainer 0: resync failed")
    with pytest.raises(StageError, match="engine 1 was ended") as caught:
        start._raise_if_engine_ended(SimpleNamespace(addresses=["a"], check=check), error)
    assert caught.value.__cause__ is error
    start._raise_if_engine_ended(SimpleNamespace(addresses=["a"], check=lambda: None), error)
    # Engines that have not started are not asked.
    start._raise_if_engine_ended(SimpleNamespace(addresses=[], check=check), error)
    start._raise_if_engine_ended(None, error)


def report(version: int, seconds: float, **changes) -> ResyncReport:
    values = {
        "version": version, "bytes": 4 * 10**9, "buckets": 5, "seconds": seconds + 1.0,
        "stage_seconds": {"gather": seconds / 2, "verify": 1.0}, "verified_tensors": 9, "mismatching": (),
        "failed_engines": {}, "stale_requests": 0, "peak_extra_bytes": 70,
    }  # fmt: skip
    return ResyncReport(**{**values, **changes})


def bench(monkeypatch, reports: list[ResyncReport]):
    """A benchmark of three repeats with these reports."""
    copies = iter([8.0, 4.0])
    asked, order = [], []

    class Watch:
        def __init__(self, pids) -> None:
            self.extra_bytes = sum(pids)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    @contextmanager
    def started(recipe, logs, progress, **how):
        assert how == {"with_engines": True, "total_updates": 1}
        yield Processes(engines=engines, trainers=trainers)

    @contextmanager
    def nothing(*_, **__):
        yield None

    def resync(version):
        asked.append(version)
        return reports[version - 1]

    address = SimpleNamespace(name="engine 0", url="u", pids=(1, 20))
    engines = SimpleNamespace(addresses=[address], key="k", release_memory=order.append, resume_memory=order.append)
    trainers = SimpleNamespace(
        pids=(3, 4), connect_engines=lambda addresses: order.append("connect"), resync=resync, export_hf="export",
        release_memory=order.append, resume_memory=order.append,
    )  # fmt: skip
    monkeypatch.setattr(resync_bench, "memcpy_gb_per_s", lambda: next(copies))
    monkeypatch.setattr(resync_bench, "session_members", lambda pid: [pid, pid + 1])
    monkeypatch.setattr(resync_bench, "MemoryWatch", Watch)
    monkeypatch.setattr(resync_bench, "started", started)
    monkeypatch.setattr(resync_bench, "versions_folder", nothing)
    monkeypatch.setattr(resync_bench, "logs_of_command", lambda *_: None)
    monkeypatch.setattr(resync_bench, "over_disk", lambda export, urls, key, folder, timeout_s: (1.5, 2.0))
    recipe = Recipe()
    recipe.resync.bucket_bytes = 100
    loaded = SimpleNamespace(recipe=recipe)
    result = resync_bench._run(loaded, "logs", SimpleNamespace(say=print), Path("f"), "qwen3_moe", 3)
    assert asked == [1, 2, 3, 4]
    return result


def test_a_benchmark_leaves_the_first_resync_out_and_its_rates_are_of_the_median(monkeypatch):
    result = bench(monkeypatch, [report(1, 90.0), report(2, 4.0), report(3, 1.0), report(4, 2.0)])
    assert (result.seconds, result.first_seconds, result.verify_seconds) == (2.0, 90.0, 1.0)
    assert result.gb_per_s == pytest.approx(2.0)
    assert result.memcpy_gb_per_s == pytest.approx(6.0)
    assert result.memcpy_fraction == pytest.approx(1 / 3)
    assert result.stage_seconds == {"gather": 1.0, "verify": 1.0}
    assert (result.export_seconds, result.reload_seconds, result.disk_seconds) == (1.5, 2.0, 3.5)
    assert (result.peak_extra_bytes, result.engines_extra_bytes, result.planned_extra_bytes) == (7, 41, 70)
    assert (result.bytes, result.buckets, result.bucket_bytes, result.repeats) == (4 * 10**9, 5, 100, 3)
    assert (result.fingerprints_equal, result.verified_tensors) == (True, 9)


def test_a_benchmark_says_whether_what_was_loaded_is_what_was_sent(monkeypatch):
    good = [report(number, 1.0) for number in (1, 2, 3, 4)]
    assert bench(monkeypatch, [report(1, 1.0, mismatching=("w",)), *good[1:]]).fingerprints_equal is False
    assert bench(monkeypatch, [*good[:3], report(4, 1.0, mismatching=("w",))]).fingerprints_equal is False
    assert bench(monkeypatch, [*good[:3], report(4, 1.0, verified_tensors=0)]).fingerprints_equal is None
    with pytest.raises(RunError, match=r"^engine 0: gone$"):
        bench(monkeypatch, [good[0], report(2, 1.0, failed_engines={"engine 0": "engine 0: gone"}), *good[2:]])


def test_a_trainer_rank_works_tells_how_far_it_is_and_closes_all_that_it_holds():
    actor = object.__new__(TrainerActor)
    actor._progress = RankProgress(5, 9, 40)
    noted = []

    def update(*given):
        actor._set_progress(1, 3)
        noted.append(given)

    actor.worker = SimpleNamespace(
        load_checkpoint=update, load_hf=lambda: noted.append("hf"),
        load_megatron=lambda path: noted.append(path), close=lambda: noted.append("worker"),
    )  # fmt: skip
    run(actor, TrainerActor.load_checkpoint, Path("saved"), None)
    assert noted == [(Path("saved"), None)]
    noted.clear()
    assert actor.progress() == RankProgress(1, 3, 41)
    actor.recipe = Recipe()
    actor.resync_session = SimpleNamespace(run=lambda version, progress: (version, progress(2, 8)))
    assert actor.resync(7) == (7, None)
    assert (actor.progress().done, actor.progress().total) == (2, 8)
    actor.worker.export_hf = lambda directory, seen: noted.append((directory, actor.progress().done)) or seen(3, 4)
    actor.export_hf(Path("hf"))
    assert (noted.pop(), actor.progress().done) == ((Path("hf"), 0), 3)
    actor.load_weights()
    actor.recipe.model.megatron = "weights"
    actor.load_weights()
    assert noted == ["hf", Path("weights")]
    actor.resync_session = SimpleNamespace(close=lambda: noted.append("session"))
    actor.controls = [SimpleNamespace(close=lambda: noted.append("control"))]
    actor.meeting = SimpleNamespace(cleanup=lambda: noted.append("meeting"))
    actor.close()
    assert noted[2:] == ["session", "control", "worker", "meeting"]
