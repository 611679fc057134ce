"""sbatch, srun, scontrol and scancel for one machine: nodes are names, a task on a node is a process with that name.

Under FAKE_SLURM lies what a test looks at and changes: `state`, `controller.pid`, `batch.pid`, `names` (one a line,
else node0, node1, ...), `NODE.env` (JSON laid over the environment of every task there), `PID.NODE.pid` of running
tasks. `sbatch --wait` plays the controller: it starts the script, starts it anew after `scontrol requeue`, and returns
the exit code of its last attempt. Without --wait that stays behind in the background, and writes where the script says.

A job that is queued again or cancelled gets SIGTERM, batch script and tasks at once, and SIGKILL after KILL_WAIT_S.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

STATE = Path(os.environ["FAKE_SLURM"])
JOB_ID = os.environ["FAKE_SLURM_JOB_ID"]
POLL_S = 0.1
KILL_AFTER_S = 40.0
KILL_WAIT_S = 30.0


def sbatch(arguments: list[str]) -> int:
    script = Path(next(text for text in arguments if text.endswith(".sbatch") and not text.startswith("-")))
    position = arguments.index(str(script))
    options, rest = arguments[:position], arguments[position + 1 :]
    lines = [line.split(None, 1)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("--output")
    parser.add_argument("--wait", action="store_true")
    known, _ = parser.parse_known_args([*(word for line in lines for word in shlex.split(line)), *options])
    if known.wait:
        return control(script, rest, known.nodes)
    with open(known.output.replace("%j", JOB_ID), "ab") as log:
        command = [sys.executable, __file__, "sbatch", "--wait", *arguments]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {JOB_ID}")
    return 0


def control(script: Path, arguments: list[str], num_nodes: int) -> int:
    """Run a job until an attempt of it is the last."""
    (STATE / "controller.pid").write_text(str(os.getpid()))
    names = STATE / "names"
    nodes = names.read_text().split() if names.exists() else [f"node{index}" for index in range(num_nodes)]
    assert len(nodes) == num_nodes
    print(f"Submitted batch job {JOB_ID}", flush=True)
    for attempt in range(5):
        environment = {
            **os.environ,
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NODELIST": ",".join(nodes),
            "SLURM_SUBMIT_DIR": os.getcwd(),
            **({"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}),
        }
        (STATE / "state").write_text("RUNNING")
        process = subprocess.Popen(["bash", str(script), *arguments], env=environment, start_new_session=True)
        (STATE / "batch.pid").write_text(str(process.pid))
        while process.poll() is None and state() == "RUNNING":
            time.sleep(POLL_S)
        if state() == "RUNNING":
            (STATE / "state").write_text("COMPLETED" if process.returncode == 0 else "FAILED")
            return process.returncode
        end_attempt(process)
        if state() != "REQUEUED":
            return process.returncode
    raise AssertionError("queued again without end")


def state() -> str:
    return (STATE / "state").read_text()


def end_attempt(batch: subprocess.Popen[bytes]) -> None:
    """Every process of it, as when all are in one control group."""
    told = []
    for file in (STATE / "batch.pid", *STATE.glob("*.*.pid")):
        try:
            told.append(psutil.Process(int(file.read_text())))
        except (FileNotFoundError, psutil.NoSuchProcess):
            continue
    everything = [process for root in told for process in (root, *descendants(root))]
    send(told, signal.SIGTERM)
    deadline = time.monotonic() + KILL_WAIT_S
    while batch.poll() is None or any(lives(process) for process in everything):
        if time.monotonic() > deadline:
            send(everything, signal.SIGKILL)
        time.sleep(POLL_S)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def scontrol(arguments: list[str]) -> int:
    arguments = [text for text in arguments if text != "--oneliner"]
    match arguments:
        case ["show", "hostnames", nodes]:
            print("\n".join(nodes.split(",")))
        case ["show", "node", nodes]:
            for node in nodes.split(","):
                print(f"NodeName={node} Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName={own_address()} State=ALLOCATED")
        case ["show", "job", job]:
            print(f"JobId={job} JobName=slimrl JobState={state()} Reason=None")
        case ["requeue", _]:
            (STATE / "state").write_text("REQUEUED")
        case _:
            print(f"scontrol: {arguments}", file=sys.stderr)
            return 1
    return 0


def scancel(arguments: list[str]) -> int:
    assert arguments == [JOB_ID]
    (STATE / "state").write_text("CANCELLED")
    return 0


def srun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nodelist", "kill-on-bad-exit", "nodes", "ntasks", "ntasks-per-node", "cpu-bind", "mem"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("output", "wait", "gpus-per-node"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    nodes = options.nodelist.split(",")
    assert int(options.nodes) == int(options.ntasks) == len(nodes)
    tasks = [start_task(node, rank, options) for rank, node in enumerate(nodes)]
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    ended: dict[str, int] = {}
    deadline = None
    while len(ended) < len(nodes):
        for node, task in zip(nodes, tasks, strict=True):
            if node in ended or task.poll() is None:
                continue
            ended[node] = task.returncode
            # Nobody may take a later process of that number for it.
            pid_file(node, task).unlink()
            if task.returncode:
                what = "Killed" if task.returncode < 0 else f"Exited with exit code {task.returncode}"
                print(f"srun: error: {node}: task {nodes.index(node)}: {what}", file=sys.stderr, flush=True)
                if options.kill_on_bad_exit == "1":
                    told.append(signal.SIGTERM)
        if told and deadline is None:
            deadline = time.monotonic() + KILL_AFTER_S
            for task in tasks:
                if task.poll() is None:
                    task.terminate()
        if deadline is not None and time.monotonic() > deadline:
            for task in tasks:
                if task.poll() is None:
                    task.kill()
        time.sleep(POLL_S)
    return max(code if code >= 0 else 128 - code for code in ended.values())


def start_task(node: str, rank: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    extra = STATE / f"{node}.env"
    environment = {
        **os.environ,
        "SLURMD_NODENAME": node,
        "SLURM_NODEID": str(rank),
        **(json.loads(extra.read_text()) if extra.exists() else {}),
    }
    where = {"env": environment, "start_new_session": True}
    if options.output:
        with open(options.output.replace("%N", node), "wb") as log:
            task = subprocess.Popen(options.command, stdout=log, stderr=log, **where)
    else:
        task = subprocess.Popen(options.command, **where)
    pid_file(node, task).write_text(str(task.pid))
    return task


def pid_file(node: str, task: subprocess.Popen[bytes]) -> Path:
    return STATE / f"{task.pid}.{node}.pid"


def own_address() -> str:
    """Not a loopback, which Ray replaces, where there is another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "scontrol": scontrol, "scancel": scancel, "srun": srun}[sys.argv[1]](sys.argv[2:]))
