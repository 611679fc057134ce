"""`slimrl launch slurm`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from slimrl.base.visible import visible
from slimrl.cli.arguments import Overrides, Overwrite, Recipe, Resume


def slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[
        int, typer.Option(help="Nodes that the run fills, without those of --spares and --spare-nodes.")
    ] = ...,  # type: ignore[assignment]
    spares: Annotated[
        int,
        typer.Option(help="Replacement nodes to request too: they replace nodes that fail a check before the start."),
    ] = 0,
    spare_nodes: Annotated[
        int | None,
        typer.Option(
            help="Spare nodes to request too: the run keeps them free until a node with trainer ranks is lost. Sets "
            "trainer.spare_nodes, which is the default."
        ),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="0 for nodes without GPUs.")] = 8,
    partition: Annotated[str | None, typer.Option(help="SLURM partition; by default the cluster's.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM account; by default yours.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 1-12:00:00.")] = None,
    container: Annotated[str | None, typer.Option(help="Image for pyxis/enroot.")] = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment; by default .venv, or none with --container.")
    ] = None,
    container_mounts: Annotated[
        str | None,
        typer.Option(metavar="SRC:DST,...", help="Mounts of the container besides the working and log folders."),
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder for job scripts and logs, on the shared file system.")] = Path(
        "runs/slurm"
    ),
    cores_per_node: Annotated[int | None, typer.Option(help="Cores that Ray may use; by default all.")] = None,
    min_free_gib: Annotated[float | None, typer.Option(help="Memory that a node must have free.")] = None,
    object_store_gib: Annotated[float | None, typer.Option(help="Size of Ray's object store on each node.")] = None,
    preflight_timeout_s: Annotated[float | None, typer.Option(help="Deadline of a node's check of itself.")] = None,
    allreduce_timeout_s: Annotated[
        float | None, typer.Option(help="Deadline of the all-reduce between the nodes.")
    ] = None,
    signal_s: Annotated[
        int, typer.Option(help="Seconds before the time limit at which the run saves a checkpoint.")
    ] = 300,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Further option of sbatch, such as --qos=high; may be repeated."),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job script without writing it; models and data need not exist.")
    ] = False,
) -> None:
    """Check a recipe, write the script of a SLURM job that runs it (train or sft), and submit it."""
    from slimrl.config.load import intended_command, load_recipe
    from slimrl.launch.job_check import check_job
    from slimrl.launch.submit import SlurmJob, job_name, job_script, submit

    given = [*(overrides or []), *([] if spare_nodes is None else [f"trainer.spare_nodes={spare_nodes}"])]
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
        allreduce_timeout_s=allreduce_timeout_s,
        signal_s=signal_s,
        sbatch=tuple(sbatch or ()),
        sft=intended_command(recipe, given) == "sft",
        resume=resume,
        overwrite=overwrite,
    )
    for note in check_job(recipe, given, job, files=not dry_run):
        typer.echo(visible(str(note)), err=True)
    loaded = load_recipe(recipe, given, "sft" if job.sft else "train").recipe
    job = replace(job, name=loaded.run.name, spare_nodes=loaded.trainer.spare_nodes)
    script = job_script(recipe, given, job)
    if dry_run:
        typer.echo(script, nl=False)
        return
    file, answer = submit(script, job_name(recipe, job), log_dir)
    typer.echo(f"{answer}\nscript: {file}\nlogs: {log_dir}/JOB/latest")
