"""The `slimrl` command. Exit codes: 0 done, 2 the user's input was refused, 1 it failed, 75 it made room (SIGUSR1)."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from slimrl.observability.terminal import plain_console
from slimrl.resync.estimate.machine import Machine

PIPED_COLUMNS = 500

COMMANDS_WITH_RECIPES = ("train", "sft", "eval", "rollout")

OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
"""How a setting on the command line begins; a recipe has no such name."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")
app.add_typer(config_app, name="config")
resync_app = typer.Typer(no_args_is_help=True, help="How the weights get from the trainer into the engines.")
app.add_typer(resync_app, name="resync")
launch_app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster.")
app.add_typer(launch_app, name="launch")


@launch_app.callback()
def _launch() -> None:
    """Start a run on a cluster."""


PREEMPTED_EXIT_CODE = 75
"""Of a run that ended at SIGUSR1 and is to be queued again; EX_TEMPFAIL of sysexits.h."""


def _check_address(address: str | None) -> str | None:
    """`auto` is refused too: it may find somebody else's cluster."""
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            raise typer.BadParameter(f"{address}: give HOST:PORT of the head node.")
    return address


Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")]
ResumeOrStart = Annotated[
    bool,
    typer.Option("--resume-or-start", help="Continue the run if it has a checkpoint, else start it; for queued jobs."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove an existing run of this name first.")]
Job = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Queued job that this is an attempt of: a run that it began is continued, "
        "--resume and --overwrite are about runs of others.",
    ),
]
CheckpointLog = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Gets a line with the step that the run goes on from, `none` for a new one, then one for each checkpoint.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="SLIMRL_RAY_ADDRESS",
        callback=_check_address,
        help="Head node of the Ray cluster to run on; without it the run starts one of its own on this machine.",
    ),
]


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slimrl {version('slimrl')}")
        raise typer.Exit


@app.callback()
def _import_from_here(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for Mixture-of-Experts language models.

    Exit codes: 0 done, 2 input refused, 1 failed, 75 stopped at SIGUSR1, to be queued again.
    """
    # Import paths of a recipe may name modules that lie beside it.
    sys.path.insert(0, os.getcwd())
    # Until a run has a log file nothing is logged; without a handler errors would go to stderr, tracebacks and all.
    logging.getLogger().addHandler(logging.NullHandler())


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turns what a command raises into one message and an exit code; everything known goes to the log."""
    from slimrl.launch.reports import LaunchError
    from slimrl.runtime.errors import Interrupted, Preempted, RunError

    errors = plain_console(stderr=True)
    try:
        yield
    except ValueError as error:
        logging.getLogger(__name__).exception("refused")
        errors.print(str(error))
        raise typer.Exit(2) from None
    except (RunError, LaunchError) as error:
        logging.getLogger(__name__).error("failed: %s", getattr(error, "details", "") or error)
        errors.print(f"failed: {error}")
        raise typer.Exit(1) from None
    except Preempted as error:
        errors.print(str(error))
        raise typer.Exit(PREEMPTED_EXIT_CODE) from None
    except KeyboardInterrupt as error:
        message = str(error) if isinstance(error, Interrupted) else "ended by SIGINT"
        logging.getLogger(__name__).info(message)
        errors.print(message)
        raise typer.Exit(1) from None


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_start: ResumeOrStart = False,
    overwrite: Overwrite = False,
    job: Job = None,
    checkpoint_log: CheckpointLog = None,
    ray_address: RayAddress = None,
    trajectories: Annotated[
        Path | None, typer.Option(help="Train on this trajectory file instead of rolling out; needs --steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="With --trajectories: how often to train on the file.")] = None,
) -> None:
    """Train with reinforcement learning."""
    with _exit_codes():
        if (trajectories is None) != (steps is None):
            raise ValueError("--trajectories and --steps go together.")
        from slimrl.runtime import commands

        if trajectories is None or steps is None:
            how = _resume(resume, resume_or_start, overwrite)
            commands.train(
                recipe,
                overrides or [],
                resume=how,
                overwrite=overwrite,
                job=job,
                checkpoint_log=checkpoint_log,
                ray_address=ray_address,
            )
            return
        given = {
            "--resume": resume,
            "--resume-or-start": resume_or_start,
            "--job": job,
            "--checkpoint-log": checkpoint_log,
        }
        if refused := [name for name, value in given.items() if value]:
            raise ValueError(f"{' and '.join(refused)} cannot go with --trajectories, which saves no checkpoints.")
        commands.train_on_file(
            recipe,
            overrides or [],
            trajectories=trajectories,
            steps=steps,
            overwrite=overwrite,
            ray_address=ray_address,
        )


def _resume(resume: bool, resume_or_start: bool, overwrite: bool) -> bool | None:
    """None for a run that is continued if there is one."""
    if resume_or_start and (resume or overwrite):
        raise ValueError("--resume-or-start goes neither with --resume nor with --overwrite.")
    return None if resume_or_start else resume


@app.command()
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_start: ResumeOrStart = False,
    overwrite: Overwrite = False,
    job: Job = None,
    checkpoint_log: CheckpointLog = None,
    ray_address: RayAddress = None,
) -> None:
    """Train on conversations (supervised)."""
    with _exit_codes():
        from slimrl.runtime import commands

        how = _resume(resume, resume_or_start, overwrite)
        commands.sft(
            recipe,
            overrides or [],
            resume=how,
            overwrite=overwrite,
            job=job,
            checkpoint_log=checkpoint_log,
            ray_address=ray_address,
        )


@app.command("eval")
def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    checkpoint: Annotated[Path, typer.Option(help="Hugging Face checkpoint folder, such as RUN/export/hf.")] = ...,  # type: ignore[assignment]
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    ray_address: RayAddress = None,
) -> None:
    """Measure a checkpoint on the recipe's evaluation sets."""
    with _exit_codes():
        from slimrl.runtime import commands

        commands.evaluate(recipe, overrides or [], checkpoint=checkpoint, json_file=json_file, ray_address=ray_address)


@app.command()
def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Trajectory file to write (JSONL).")] = ...,  # type: ignore[assignment]
    ray_address: RayAddress = None,
) -> None:
    """Make one step's trajectories with model.path and write them to a file."""
    with _exit_codes():
        from slimrl.runtime import commands

        commands.rollout(recipe, overrides or [], out=out, ray_address=ray_address)


@app.command()
def export(
    recipe: Recipe,
    overrides: Overrides = None,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint of a run, such as RUN/checkpoints/step_000010.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="Folder to write.")] = ...,  # type: ignore[assignment]
    ray_address: RayAddress = None,
) -> None:
    """Turn a checkpoint of a run into a Hugging Face checkpoint."""
    with _exit_codes():
        from slimrl.runtime import commands

        commands.export(recipe, overrides or [], checkpoint=checkpoint, out=out, ray_address=ray_address)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are seeds of one run.")],
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("curve.png"),
    title: Annotated[str, typer.Option(help="Above the drawing.")] = "",
) -> None:
    """Draw the learning curve of one run, or of several seeds."""
    with _exit_codes():
        from slimrl.observability.report import write_curve
        from slimrl.observability.run_folder import RunFolder

        missing = [str(run) for run in runs if not RunFolder(run).metrics.is_file()]
        if missing:
            raise ValueError(f"no metrics.jsonl in {', '.join(missing)}")
        write_curve([RunFolder(run).metrics for run in runs], out, title)
        typer.echo(f"curve: {out}")


@config_app.command("show")
def config_show(
    recipe: Recipe,
    overrides: Overrides = None,
    command: Annotated[
        str | None, typer.Option(help="train, sft, eval or rollout; without it what the recipe is made for.")
    ] = None,
) -> None:
    """Print every setting with its value and where that came from."""
    with _exit_codes():
        from slimrl.config.load import intended_command, load_recipe
        from slimrl.config.show import show

        if command not in (None, *COMMANDS_WITH_RECIPES):
            raise ValueError(f"--command {command}: {', '.join(COMMANDS_WITH_RECIPES)}")
        table = Table(box=None, header_style="bold")
        for title in ("key", "value", "from"):
            table.add_column(title, overflow="fold")
        meant = command or intended_command(recipe, overrides or [])
        for row in show(load_recipe(recipe, overrides or [], meant)):  # type: ignore[arg-type]
            table.add_row(*row)
        # Into a file or a pipe each setting goes whole, on one line.
        plain_console(soft_wrap=False, piped_columns=PIPED_COLUMNS).print(table)


@config_app.command("check")
def config_check(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...", help="Recipes, YAML files, and settings laid over each of them."
        ),
    ],
    command: Annotated[
        str | None, typer.Option(help="train, sft, eval or rollout; without it what each recipe is made for.")
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Refuse what is not on this machine: model, data.")] = False,
) -> None:
    """Say everything that is wrong with recipes, without a GPU or their models. Exit codes: 0 nothing is, 1 refused."""
    with _exit_codes():
        from slimrl.runtime.config_check import check_recipes

        if command not in (None, *COMMANDS_WITH_RECIPES):
            raise ValueError(f"--command {command}: {', '.join(COMMANDS_WITH_RECIPES)}")
        overrides = [argument for argument in recipes if OVERRIDE.match(argument)]
        paths = [Path(argument) for argument in recipes if not OVERRIDE.match(argument)]
        if not paths:
            raise ValueError("no recipe given.")
        console = plain_console()
        if not check_recipes(paths, overrides, command=command, files=files, console=console):  # type: ignore[arg-type]
            raise typer.Exit(1)


@config_app.command("schema")
def config_schema() -> None:
    """Print the reference of every setting: its type, its default, and what it means."""
    with _exit_codes():
        from slimrl.config.reference import reference_page

        typer.echo(reference_page(), nl=False)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(help="Trainer ranks and engines fill one node after the other.")] = 8,
    gpu_memory_gib: Annotated[float, typer.Option(help="Of one GPU.")] = 80.0,
    reserve_gib: Annotated[float, typer.Option(help="Of it, not for tensors: CUDA contexts, communication.")] = 4.0,
    host_memory_gib: Annotated[float, typer.Option(help="Of a node, for what trainer ranks keep there.")] = 1800.0,
    peak_tflops: Annotated[float, typer.Option(help="Of one GPU, dense bf16.")] = 989.0,
    mfu: Annotated[float, typer.Option(help="Share of the peak that is reached while computing.")] = 0.4,
    expert_load: Annotated[float, typer.Option(help="Tokens of the busiest expert-parallel rank over the mean.")] = 1.0,
    memory_gb_per_s: Annotated[float, typer.Option(help="Of a GPU's memory, read.")] = Machine.memory_gb_per_s,
    nvlink_gb_per_s: Annotated[float, typer.Option(help="Of a GPU, each way.")] = Machine.nvlink_gb_per_s,
    network_gb_per_s: Annotated[float, typer.Option(help="Of a GPU's adapter, each way.")] = Machine.network_gb_per_s,
    mean_tokens: Annotated[
        int | None, typer.Option(help="Mean length of a trajectory or conversation; without it the longest allowed.")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank legal layouts of --gpus instead.")] = False,
    gpus: Annotated[int | None, typer.Option(help="With --suggest: trainer ranks; without it the recipe's.")] = None,
    top: Annotated[int, typer.Option(help="With --suggest: layouts to show.")] = 8,
    to_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, memory, time and resync of a recipe on a cluster that need not be there; by default of H100.

    It ends with exit code 1 where nothing fits.
    """
    with _exit_codes():
        from slimrl.observability.logs import quiet_megatron

        quiet_megatron()
        from slimrl.planner.command import run
        from slimrl.planner.hardware import Hardware

        hardware = Hardware(
            gpus_per_node=gpus_per_node,
            gpu_memory_gib=gpu_memory_gib,
            reserve_gib=reserve_gib,
            host_memory_gib=host_memory_gib,
            peak_tflops=peak_tflops,
            mfu=mfu,
            expert_load=expert_load,
            links=Machine(
                memory_gb_per_s=memory_gb_per_s, nvlink_gb_per_s=nvlink_gb_per_s, network_gb_per_s=network_gb_per_s
            ),
        )
        fits = run(
            recipe,
            overrides or [],
            hardware,
            mean_tokens=mean_tokens,
            suggestions_wanted=suggest,
            gpus=gpus,
            top=top,
            to_json=to_json,
        )
        if not fits:
            raise typer.Exit(1)


@resync_app.command("estimate")
def resync_estimate(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(help="Trainer ranks and engines fill one node after the other.")] = 8,
    block_fp8: Annotated[bool, typer.Option("--block-fp8", help="Engines hold the model in block FP8.")] = False,
    memory_gb_per_s: Annotated[
        float, typer.Option(help="Of a GPU's memory, reading and writing together.")
    ] = Machine.memory_gb_per_s,
    nvlink_gb_per_s: Annotated[
        float, typer.Option(help="Of a GPU to those of its node, each way.")
    ] = Machine.nvlink_gb_per_s,
    network_gb_per_s: Annotated[
        float, typer.Option(help="Of a GPU's network adapter, each way.")
    ] = Machine.network_gb_per_s,
    pcie_gb_per_s: Annotated[float, typer.Option(help="Between a GPU and its host, each way.")] = Machine.pcie_gb_per_s,
    disk_write_gb_per_s: Annotated[
        float, typer.Option(help="Shared file system, one node writing.")
    ] = Machine.disk_write_gb_per_s,
    disk_read_gb_per_s: Annotated[
        float, typer.Option(help="Shared file system, one node reading.")
    ] = Machine.disk_read_gb_per_s,
    disk_read_total_gb_per_s: Annotated[
        float, typer.Option(help="The same, all nodes together.")
    ] = Machine.disk_read_total_gb_per_s,
    hop_us: Annotated[float, typer.Option(help="What each node adds to a broadcast along a chain.")] = Machine.hop_us,
    gather_us: Annotated[
        float, typer.Option(help="A trainer rank's time for one piece, besides the bytes.")
    ] = Machine.gather_us,
    load_us: Annotated[
        float, typer.Option(help="An engine rank's time for one tensor, besides the bytes.")
    ] = Machine.load_us,
    bucket_ms: Annotated[float, typer.Option(help="The engines' call for one bucket.")] = Machine.bucket_ms,
    to_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bytes by link and seconds of a resync on a cluster that need not be there; by default with nodes of 8 H100."""
    with _exit_codes():
        from slimrl.observability.logs import quiet_megatron

        quiet_megatron()
        from slimrl.runtime.resync_estimate import estimate_resync

        machine = Machine(
            memory_gb_per_s=memory_gb_per_s,
            nvlink_gb_per_s=nvlink_gb_per_s,
            network_gb_per_s=network_gb_per_s,
            pcie_gb_per_s=pcie_gb_per_s,
            disk_write_gb_per_s=disk_write_gb_per_s,
            disk_read_gb_per_s=disk_read_gb_per_s,
            disk_read_total_gb_per_s=disk_read_total_gb_per_s,
            hop_us=hop_us,
            gather_us=gather_us,
            load_us=load_us,
            bucket_ms=bucket_ms,
        )
        estimate_resync(
            recipe,
            overrides or [],
            gpus_per_node=gpus_per_node,
            machine=machine,
            block_fp8=block_fp8,
            to_json=to_json,
        )


@resync_app.command("bench")
def resync_bench(
    recipe: Recipe,
    overrides: Overrides = None,
    gigabytes: Annotated[float, typer.Option(help="About the size of the model, in 1e9 bytes.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured resyncs, after a first one.")] = 3,
    family: Annotated[str | None, typer.Option(help="Of the model; without it that of model.path.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure real resyncs on this machine: the recipe's trainer and engines, a random model of a stated size."""
    with _exit_codes():
        from slimrl.runtime.resync_bench import bench_resync

        bench_resync(recipe, overrides or [], family=family, gigabytes=gigabytes, repeats=repeats, to_json=json_output)


@launch_app.command("slurm")
def launch_slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes that the run uses.")] = ...,  # type: ignore[assignment]
    spares: Annotated[int, typer.Option(help="Nodes asked for beside them, in place of those that fail a check.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="0 for nodes without.")] = 8,
    partition: str | None = None,
    account: str | None = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 1-12:00:00.")] = None,
    container: Annotated[str | None, typer.Option(help="Image for pyxis/enroot.")] = None,
    venv: Annotated[Path | None, typer.Option(help="Virtual environment; .venv without it or --container.")] = None,
    container_mounts: Annotated[
        str | None,
        typer.Option(metavar="SRC:DST,...", help="What the container sees beside the working and log folders."),
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="On the shared file system.")] = Path("runs/slurm"),
    cores_per_node: Annotated[int | None, typer.Option(help="That Ray counts on; by default all.")] = None,
    min_free_gib: Annotated[float | None, typer.Option(help="Memory that a node must have free.")] = None,
    object_store_gib: Annotated[float | None, typer.Option(help="Shared memory of Ray on each node.")] = None,
    preflight_timeout_s: Annotated[float | None, typer.Option(help="For a node to check itself.")] = None,
    meeting_timeout_s: Annotated[float | None, typer.Option(help="For the all-reduce of the nodes.")] = None,
    signal_s: Annotated[int, typer.Option(help="Seconds before the time limit at which a checkpoint is made.")] = 300,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="A further option of sbatch, such as --qos=high; may be given repeatedly."),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job script; nothing is written, and files need not be here.")
    ] = False,
) -> None:
    """Check a recipe, write the script of a SLURM job that trains it as it is meant (train or sft), and submit it."""
    with _exit_codes():
        from slimrl.config.load import intended_command
        from slimrl.launch.job_check import check_job
        from slimrl.launch.submit import SlurmJob, job_script, submit

        job = SlurmJob(
            nodes=nodes,
            spares=spares,
            gpus_per_node=gpus_per_node,
            partition=partition,
            account=account,
            time=time,
            container=container,
            container_mounts=container_mounts,
            venv=venv,
            log_dir=log_dir,
            cores_per_node=cores_per_node,
            min_free_gib=min_free_gib,
            object_store_gib=object_store_gib,
            preflight_timeout_s=preflight_timeout_s,
            meeting_timeout_s=meeting_timeout_s,
            signal_s=signal_s,
            sbatch=tuple(sbatch or ()),
            sft=intended_command(recipe, overrides or []) == "sft",
            resume=resume,
            overwrite=overwrite,
        )
        for note in check_job(recipe, overrides or [], job, files=not dry_run):
            typer.echo(note, err=True)
        script = job_script(recipe, overrides or [], job)
        if dry_run:
            typer.echo(script, nl=False)
            return
        file, answer = submit(script, recipe.stem, log_dir)
        typer.echo(f"{answer}\nscript: {file}\nlogs: {log_dir}/JOB/latest")


if __name__ == "__main__":
    app()
