"""`slimrl train`, `sft`, `rollout`, `export` and `report`."""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from slimrl.base.imports import imports_uncollected
from slimrl.cli.arguments import (
    CheckpointLog,
    Job,
    Overrides,
    Overwrite,
    Profile,
    ProfileTorch,
    RayAddress,
    Recipe,
    Resume,
    ResumeOrStart,
)
from slimrl.observability.profiling.recorder import Profiled, check_profiled, parse_steps
from slimrl.observability.run_folder import Opening, RunFolder, check_start


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
    steps: Annotated[int | None, typer.Option(help="With --trajectories: times to train on the file.")] = None,
    profile: Profile = None,
    profile_torch: ProfileTorch = False,
) -> None:
    """Train with reinforcement learning."""
    profiled = _profiled(profile, profile_torch)
    if (trajectories is None) != (steps is None):
        raise ValueError("--trajectories and --steps go together.")
    if trajectories is None or steps is None:
        how = _opening(resume, resume_or_start, overwrite, job, checkpoint_log)
        _refuse_early(recipe, overrides or [], "train", profiled, how)
    with imports_uncollected():
        from slimrl.runtime import commands

    if trajectories is None or steps is None:
        commands.train(recipe, overrides or [], ray_address=ray_address, profiled=profiled, **how)
        return
    given = {"--resume": resume, "--resume-or-start": resume_or_start, "--job": job, "--checkpoint-log": checkpoint_log}
    if refused := [name for name, value in given.items() if value]:
        raise ValueError(f"{' and '.join(refused)} cannot go with --trajectories, which saves no checkpoints.")
    commands.train_on_file(
        recipe,
        overrides or [],
        trajectories=trajectories,
        steps=steps,
        overwrite=overwrite,
        ray_address=ray_address,
        profiled=profiled,
    )


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    resume_or_start: ResumeOrStart = False,
    overwrite: Overwrite = False,
    job: Job = None,
    checkpoint_log: CheckpointLog = None,
    ray_address: RayAddress = None,
    profile: Profile = None,
    profile_torch: ProfileTorch = False,
) -> None:
    """Train on conversations (supervised)."""
    how = _opening(resume, resume_or_start, overwrite, job, checkpoint_log)
    profiled = _profiled(profile, profile_torch)
    _refuse_early(recipe, overrides or [], "sft", profiled, how)
    with imports_uncollected():
        from slimrl.runtime import commands

    commands.sft(recipe, overrides or [], ray_address=ray_address, profiled=profiled, **how)


def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Trajectory file to write (JSONL).")] = ...,  # type: ignore[assignment]
    conversations: Annotated[
        Path | None, typer.Option(help="Write completed ones as conversations for `slimrl sft` too (JSONL).")
    ] = None,
    min_reward: Annotated[float, typer.Option(help="Smallest reward of a trajectory in --conversations.")] = 1.0,
    ray_address: RayAddress = None,
) -> None:
    """Sample the trajectories of one step with model.path and write them to a file."""
    with imports_uncollected():
        from slimrl.runtime import commands

    commands.rollout(
        recipe,
        overrides or [],
        out=out,
        conversations=conversations,
        min_reward=min_reward,
        ray_address=ray_address,
    )


def export(
    recipe: Recipe,
    overrides: Overrides = None,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint of a run, such as RUN/checkpoints/step_000010.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="Folder to write.")] = ...,  # type: ignore[assignment]
    ray_address: RayAddress = None,
) -> None:
    """Convert a checkpoint of a run to a Hugging Face checkpoint."""
    with imports_uncollected():
        from slimrl.runtime import commands

    commands.export(recipe, overrides or [], checkpoint=checkpoint, out=out, ray_address=ray_address)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are taken as seeds of one run.")
    ],
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("curve.png"),
    title: Annotated[str, typer.Option(help="Title of the figure, or of the page.")] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write this HTML page of the runs instead, which needs no network.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve that page at 127.0.0.1 while the runs go on, until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --follow: port of the page; 0 for one that is free.", min=0)] = 0,
    trajectories: Annotated[
        int | None, typer.Option(help="With --html or --follow: largest number of trajectories in the page.", min=1)
    ] = None,
) -> None:
    """Draw the learning curve of one run, or of several seeds, and print where the time of its steps goes; or make a
    page of runs."""
    from slimrl.base.output_file import check_output_file
    from slimrl.observability.metrics import read_metrics
    from slimrl.observability.profiling.breakdown import step_profiles
    from slimrl.observability.profiling.tables import phases_table, profile_tables
    from slimrl.observability.profiling.trace import read_spans
    from slimrl.observability.report import write_curve
    from slimrl.observability.terminal import plain_console

    if follow and html is not None:
        raise ValueError("--follow and --html exclude each other.")
    if port and not follow:
        raise ValueError("--port goes with --follow.")
    if follow:
        _follow(runs, title, trajectories, port)
        return
    if html is not None:
        _write_page(runs, html, title, trajectories)
        return
    if trajectories is not None:
        raise ValueError("--trajectories goes with --html or --follow.")
    if missing := [str(run) for run in runs if not RunFolder(run).metrics.is_file()]:
        raise ValueError(f"no metrics.jsonl in {', '.join(missing)}")
    check_output_file("--out", out)
    write_curve([RunFolder(run).metrics for run in runs], out, title)
    console = plain_console()
    for run in map(RunFolder, runs):
        if (table := phases_table(read_metrics(run.metrics))) is not None:
            console.print(f"{run.path}", table, sep="\n")
        for profiled in step_profiles(read_spans(run.profile)):
            console.print("", profile_tables(profiled), sep="\n")
    typer.echo(f"curve: {out}")


def _write_page(runs: list[Path], html: Path, title: str, trajectories: int | None) -> None:
    from slimrl.base.output_file import check_output_file
    from slimrl.observability.page.document import MOST_TRAJECTORIES, write_page
    from slimrl.observability.progress import Progress
    from slimrl.observability.terminal import plain_console
    from slimrl.observability.units import show_bytes

    check_output_file("--html", html)
    most = MOST_TRAJECTORIES if trajectories is None else trajectories
    with Progress(0, plain_console(stderr=True)) as progress, progress.phase("page", 0, "steps") as phase:
        held = write_page(runs, html, title, most, phase.update).data["trajectories"]
    typer.echo(f"page: {html}, {show_bytes(html.stat().st_size)}, {held['shown']} of {held['found']} trajectories")


def _follow(runs: list[Path], title: str, trajectories: int | None, port: int) -> None:
    from slimrl.observability.page.document import MOST_TRAJECTORIES
    from slimrl.observability.page.follower import Follower
    from slimrl.observability.page.server import PageServer

    most = MOST_TRAJECTORIES if trajectories is None else trajectories
    server = PageServer(Follower(runs, title, most), port)
    typer.echo(f"page: {server.address}")
    typer.echo("It follows the runs until Ctrl-C.")
    with suppress(KeyboardInterrupt):
        server.serve()


def _refuse_early(
    path: Path, overrides: list[str], command: Literal["train", "sft"], profiled: Profiled | None, how: Opening
) -> None:
    """Refuse what recipe, arguments and the run's folder alone forbid, before the seconds that large imports take."""
    from slimrl.base.folder_lock import folder_lock
    from slimrl.config.load import read_recipe
    from slimrl.config.problems import RecipeError

    loaded, problems = read_recipe(path, overrides, command)
    if loaded is None:
        raise RecipeError(problems)
    if problems:
        return  # They are named together with those of the recipe's files.
    check_profiled(profiled, loaded.recipe.steps)
    run = RunFolder(Path(loaded.recipe.run.dir) / loaded.recipe.run.name)
    resume, overwrite = how["resume"], how["overwrite"]
    # What becomes of the run in an attempt of a job depends on more.
    if resume is not None and how["job"] is None:
        with folder_lock(run.path) if run.config.is_file() else nullcontext():
            check_start(run, resume=resume, overwrite=overwrite)


def _profiled(steps: str | None, torch: bool) -> Profiled | None:
    if steps is None:
        if torch:
            raise ValueError("--profile-torch goes with --profile.")
        return None
    return Profiled(steps=parse_steps(steps), torch=torch)


def _opening(
    resume: bool, resume_or_start: bool, overwrite: bool, job: str | None, checkpoint_log: Path | None
) -> Opening:
    if resume_or_start and (resume or overwrite):
        raise ValueError("--resume-or-start goes neither with --resume nor with --overwrite.")
    return Opening(
        resume=None if resume_or_start else resume, overwrite=overwrite, job=job, checkpoint_log=checkpoint_log
    )
