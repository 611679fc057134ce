"""`slimrl resync bench`: real resyncs of a random model of a stated size, from the recipe's trainer to its engines.

1. Write a checkpoint of the recipe's family, of about the stated size.
2. Start the recipe's trainer ranks and engines with it.
3. Run one resync, which makes the buffers, and measure the next ones. Then export the same weights to the disk and have
   all engines reload them from the page cache.
4. Measure a copy in memory before and after, and the memory of all processes meanwhile.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from slimrl.base.errors import RunError
from slimrl.config.load import Command, LoadedRecipe, read_recipe
from slimrl.config.problems import RecipeError
from slimrl.data.engine import EngineError
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.control import SglangControl
from slimrl.models.hf_config import config_for_planning, published_model
from slimrl.observability.memory import MemoryWatch, session_members
from slimrl.observability.progress import Progress
from slimrl.observability.terminal import plain_console
from slimrl.resync.engine_calls import fan_out
from slimrl.resync.report import ResyncReport
from slimrl.runtime.cluster.memory_phases import MemoryPhase, MemorySchedule
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.resync_tools.memcpy import memcpy_gb_per_s
from slimrl.runtime.start import logs_of_command, prepare, started
from slimrl.runtime.versions_folder import versions_folder
from slimrl.toys.sized_toy import sized_config, write_sized_toy

MAX_GIGABYTES = 1000.0
FAMILY = "qwen3_moe"
"""Family of the model, where the recipe's model is neither on the disk nor published"""
MOVE_NOTHING = ("pause", "agree", "wait", "activate")
"""Stages that move no bytes, and so have no rate"""
COMMAND: Command = "resync bench"
SETTINGS = (
    "rollout.sglang.max_total_tokens=1024",
    # Memory that trainer ranks take while an engine starts counts against its share.
    "rollout.sglang.mem_fraction_static=0.5",
    "resync.verify=full",
)
"""Override the recipe, and the command line overrides them: engines generate nothing here."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Figures of one benchmark; seconds are medians over the repeats."""

    family: str
    transport: str
    bytes: int
    """Bytes of the tensors sent, counted once however many engines received them"""
    buckets: int
    bucket_bytes: int
    repeats: int
    seconds: float
    """Duration of a resync from pause to resume, without verification"""
    verify_seconds: float
    first_seconds: float
    """Duration of the resync that made the buffers, without verification"""
    gb_per_s: float
    memcpy_gb_per_s: float
    """Throughput of a memcpy by one thread, with its buffers in memory"""
    memcpy_fraction: float
    """Quotient of `gb_per_s` and `memcpy_gb_per_s`"""
    stage_seconds: dict[str, float]
    """Seconds of each stage, as in ResyncReport"""
    export_seconds: float
    reload_seconds: float
    disk_seconds: float
    """Seconds of export and reload together"""
    peak_extra_bytes: int
    """Measured: host memory that all trainer ranks took beyond what they had before, shared memory counted once. On a
    GPU the buffers are not in it; see `planned_extra_bytes`."""
    engines_extra_bytes: int
    """Measured in the same way: host memory of all processes of all engines"""
    planned_extra_bytes: int
    """Planned size of the buffers of the trainer rank with the most"""
    fingerprints_equal: bool | None
    """Whether all fingerprints were equal; None where nothing was compared"""
    verified_tensors: int


def bench_resync(
    path: Path, overrides: Sequence[str], *, family: str | None, gigabytes: float, repeats: int, to_json: bool
) -> None:
    """Measure a recipe's resync, and print the result.

    Raises:
        ValueError: the recipe, family or size is refused.
        RunError: a process or the resync failed, or loaded tensors differ from the trainer's.
    """
    if repeats < 1:
        raise ValueError(f"--repeats {repeats}: at least 1")
    if not gigabytes > 0:
        raise ValueError(f"--gigabytes {gigabytes:g}: must be greater than 0")
    if gigabytes >= MAX_GIGABYTES:
        raise ValueError(f"--gigabytes {gigabytes:g}: must be less than {MAX_GIGABYTES:g}")
    first, problems = read_recipe(path, [*SETTINGS, *overrides], COMMAND)
    if first is None:
        raise RecipeError(problems)
    recipe = first.recipe
    dtype = recipe.trainer.precision.dtype
    with (
        Progress(0, plain_console(stderr=True)) as progress,
        tempfile.TemporaryDirectory(prefix="slimrl-bench-") as folder,
    ):
        family = family or _family_of(Path(recipe.model.path), progress)
        config = sized_config(family, round(gigabytes * 1e9), dtype, recipe.trainer.parallel)
        model = Path(folder) / "model"
        with progress.stage("writing the model"):
            write_sized_toy(config, model, recipe.seed)
        settings = [*SETTINGS, *overrides, f"model.path={model}", "model.megatron=''", f"run.dir={folder}"]
        loaded, _ = prepare(path, settings, COMMAND, progress, lambda _: None)
        # The model has no tokenizer, and the engines read no text.
        loaded.recipe.rollout.sglang["skip_tokenizer_init"] = True
        result = _run(loaded, recipe.run.dir, progress, Path(folder), family, repeats)
    print(json.dumps(asdict(result), indent=2)) if to_json else _print(result)
    if result.fingerprints_equal is False:
        raise RunError("tensors that the engines loaded differ from the trainer's")


def _family_of(model_path: Path, progress: Progress) -> str:
    """Model family of the checkpoint, or of the published model of its name; else FAMILY, after telling the user."""
    if not model_path.exists() and published_model(model_path.name) is None:
        progress.say(f"model.path: {model_path} does not exist; measuring a {FAMILY} (--family selects another)")
        return FAMILY
    return str(config_for_planning(model_path)[0]["model_type"])


def _run(
    loaded: LoadedRecipe, log_dir: str, progress: Progress, folder: Path, family: str, repeats: int
) -> BenchResult:
    recipe = loaded.recipe
    with (
        versions_folder(loaded, wait_s=0.0, say=progress.say),
        started(
            recipe, logs_of_command(log_dir, "resync-bench", loaded), progress, with_engines=True, total_updates=1
        ) as processes,
    ):
        assert processes.engines is not None
        assert processes.trainers is not None
        MemorySchedule(processes.engines, processes.trainers, enabled=recipe.rollout.colocated).enter(
            MemoryPhase.exchange
        )
        copies = [memcpy_gb_per_s()]
        engine_pids = [pid for address in processes.engines.addresses for pid in session_members(address.pids[-1])]
        with MemoryWatch(processes.trainers.pids) as trainer_memory, MemoryWatch(engine_pids) as engine_memory:
            processes.trainers.connect_engines(processes.engines.addresses)
            first, *reports = [_resync(processes.trainers, version) for version in range(1, repeats + 2)]
        export_s, reload_s = over_disk(
            processes.trainers.export_hf,
            {address.name: address.url for address in processes.engines.addresses},
            processes.engines.key,
            folder / "export",
            recipe.trainer.timeout_s,
        )
        copies.append(memcpy_gb_per_s())
    seconds = statistics.median(report.transfer_seconds for report in reports)
    memcpy = statistics.median(copies)
    verified = min(report.verified_tensors for report in reports)
    return BenchResult(
        family=family,
        transport=recipe.resync.transport.value,
        bytes=first.bytes,
        buckets=first.buckets,
        bucket_bytes=recipe.resync.bucket_bytes,
        repeats=repeats,
        seconds=seconds,
        verify_seconds=statistics.median(report.stage_seconds["verify"] for report in reports),
        first_seconds=first.transfer_seconds,
        gb_per_s=first.bytes / 1e9 / seconds,
        memcpy_gb_per_s=memcpy,
        memcpy_fraction=first.bytes / 1e9 / seconds / memcpy,
        stage_seconds={
            stage: statistics.median(report.stage_seconds.get(stage, 0.0) for report in reports)
            for stage in reports[0].stage_seconds
        },
        export_seconds=export_s,
        reload_seconds=reload_s,
        disk_seconds=export_s + reload_s,
        peak_extra_bytes=trainer_memory.extra_bytes,
        engines_extra_bytes=engine_memory.extra_bytes,
        planned_extra_bytes=first.peak_extra_bytes,
        fingerprints_equal=not any(report.mismatching for report in (first, *reports)) if verified else None,
        verified_tensors=verified,
    )


def _resync(trainers: TrainerGroup, version: int) -> ResyncReport:
    report = trainers.resync(version)
    if report.failed_engines:
        raise RunError("; ".join(report.failed_engines.values()))
    return report


def over_disk(
    export: Callable[[Path], object], engines: Mapping[str, str], key: EngineKey, folder: Path, timeout_s: float
) -> tuple[float, float]:
    """Seconds of an export, and of its loading by all engines from the page cache.

    Args:
        engines: their URLs by name.
        key: of all engines.
        timeout_s: deadline of the loading.

    Raises:
        RunError: an engine did not load it.
    """
    start = time.perf_counter()
    export(folder)
    exported = time.perf_counter()
    controls = [SglangControl(name, url, key=key, timeout_s=timeout_s) for name, url in engines.items()]
    try:
        fan_out(
            {control.name: partial(control.load_checkpoint, str(folder.absolute())) for control in controls},
            "load_checkpoint",
            timeout_s,
        )
    except EngineError as error:
        raise RunError(str(error)) from error
    finally:
        for control in controls:
            control.close()
    return exported - start, time.perf_counter() - exported


def _print(result: BenchResult) -> None:
    console = plain_console()
    gigabytes = result.bytes / 1e9
    title = f"{result.family}, {gigabytes:.2f} GB in {result.buckets} buckets, {result.transport}"
    table = Table(title=title)
    for column in ("", "seconds", "GB/s", "of memcpy"):
        table.add_column(column, justify="right" if column else "left")
    rows = {
        "memcpy, one thread": gigabytes / result.memcpy_gb_per_s,
        "resync": result.seconds,
        **{f"  {stage}": seconds for stage, seconds in result.stage_seconds.items() if stage != "verify"},
        "verification": result.verify_seconds,
        "the first resync": result.first_seconds,
        "over the disk": result.disk_seconds,
        "  export": result.export_seconds,
        "  reload": result.reload_seconds,
    }
    for name, seconds in rows.items():
        rate = gigabytes / seconds if seconds and name.strip() not in MOVE_NOTHING else 0.0
        shown = (f"{rate:.2f}", f"{rate / result.memcpy_gb_per_s:.2f}") if rate else ("", "")
        table.add_row(name, f"{seconds:.3f}", *shown)
    console.print(table)
    equal = {True: "equal", False: "DIFFERENT", None: "not compared"}[result.fingerprints_equal]
    console.print(
        f"fingerprints: {equal} ({result.verified_tensors} tensors); peak extra memory: trainer "
        f"{result.peak_extra_bytes / 1e6:.0f} MB, engines {result.engines_extra_bytes / 1e6:.0f} MB; "
        f"buckets of {result.bucket_bytes / 1e6:.0f} MB"
    )
