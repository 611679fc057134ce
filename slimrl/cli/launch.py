"""`slimrl launch slurm`."""

from pathlib import Path
from typing import Annotated

import typer

from slimrl.cli.arguments import Overrides, Overwrite, Recipe, Resume
from slimrl.cli.exit_codes import exit_codes


def slurm(
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
    with exit_codes():
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
