"""sbatch, srun and scontrol for one machine: nodes are names, a task on a node is a process with that name.

Under FAKE_SLURM lies what a test looks at and changes: `state`, `batch.pid`, `NODE.env` (JSON laid over the
environment of every task there), `STEP.NODE.pid` of running tasks. `sbatch` is always as with --wait: it stays, plays
the controller, starts the script anew after `scontrol requeue`, and returns the exit code of its last attempt.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_SLURM"])
JOB_ID = os.environ["FAKE_SLURM_JOB_ID"]
POLL_S = 0.1
KILL_AFTER_S = 40.0


def sbatch(arguments: list[str]) -> int:
    script = Path(next(text for text in arguments if text.endswith(".sbatch") and not text.startswith("-")))
    position = arguments.index(str(script))
    options, rest = arguments[:position], arguments[position + 1 :]
    lines = [line.split(None, 1)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("--wait", action="store_true")
    known, _ = parser.parse_known_args([*lines, *options])
    nodes = [f"node{index}" for index in range(known.nodes)]
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
        process = subprocess.Popen(["bash", str(script), *rest], env=environment, start_new_session=True)
        (STATE / "batch.pid").write_text(str(process.pid))
        while process.poll() is None and (STATE / "state").read_text() == "RUNNING":
            time.sleep(POLL_S)
        if (STATE / "state").read_text() != "REQUEUED":
            process.wait()
            (STATE / "state").write_text("COMPLETED" if process.returncode == 0 else "FAILED")
            return process.returncode
        process.kill()
        process.wait()
    raise AssertionError("queued again without end")


def scontrol(arguments: list[str]) -> int:
    arguments = [text for text in arguments if text != "--oneliner"]
    match arguments:
        case ["show", "hostnames", nodes]:
            print("\n".join(nodes.split(",")))
        case ["show", "node", nodes]:
            for node in nodes.split(","):
                print(f"NodeName={node} Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName={own_address()} State=ALLOCATED")
        case ["show", "job", job]:
            print(f"JobId={job} JobName=slimrl JobState={(STATE / 'state').read_text()} Reason=None")
        case ["requeue", _]:
            (STATE / "state").write_text("REQUEUED")
        case _:
            print(f"scontrol: {arguments}", file=sys.stderr)
            return 1
    return 0


def srun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nodelist", "output", "kill-on-bad-exit", "nodes", "ntasks", "ntasks-per-node", "cpu-bind", "mem"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("wait", "gpus-per-node"):
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
    with open(options.output.replace("%N", node), "wb") as log:
        task = subprocess.Popen(options.command, env=environment, stdout=log, stderr=log, start_new_session=True)
    step = Path(options.output).name.split(".")[0]
    (STATE / f"{step}.{node}.pid").write_text(str(task.pid))
    return task


def own_address() -> str:
    """Not a loopback, which Ray replaces, where there is another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "scontrol": scontrol, "srun": srun}[sys.argv[1]](sys.argv[2:]))
