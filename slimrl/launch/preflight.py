"""`python -m slimrl.launch.preflight`: a node checks itself before a job starts on it.

It runs once on every node of an allocation. The problems that the checks find go into the node's report, which is
written however many there are. The check between nodes is allreduce.py.
"""

import argparse
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from slimrl.launch.ports import PortBlock
from slimrl.launch.reports import NodeReport, write_report

PACKAGES = ("slimrl", "torch", "megatron-core", "sglang", "ray", "transformers", "safetensors", "transformer-engine")
"""Packages whose versions must be equal on all nodes."""

MAX_USED_MIB = 2048
"""Largest GPU memory in MiB that the driver itself may use; more than this belongs to another program."""

COMMAND_TIMEOUT_S = 60.0

_QUERY = ("index", "memory.used", "ecc.errors.uncorrected.volatile.total", "driver_version")


def main() -> None:
    """Write this node's report; exit code 1 if it has problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the attempt's, on the shared file system")
    parser.add_argument("--gpus", type=int, required=True, help="number that the node must have; 0 for none")
    parser.add_argument("--min-free-gib", type=float, required=True)
    parser.add_argument("--first-port", type=int, help="of the job's port block; leave out to skip the check of ports")
    arguments = parser.parse_args()
    report = inspect_node(
        node_name(),
        canary=arguments.folder / "canary",
        gpus=arguments.gpus,
        min_free_gib=arguments.min_free_gib,
        ports=None if arguments.first_port is None else PortBlock(arguments.first_port),
    )
    write_report(arguments.folder / "preflight", report)
    for problem in report.problems:
        print(f"{report.node}: {problem}", file=sys.stderr)
    sys.exit(1 if report.problems else 0)


def node_name() -> str:
    """SLURM's name of this node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def inspect_node(node: str, *, canary: Path, gpus: int, min_free_gib: float, ports: PortBlock | None) -> NodeReport:
    """Run all checks on this node."""
    free_gib = psutil.virtual_memory().available / 2**30
    problems = canary_problems(canary)
    if free_gib < min_free_gib:
        problems.append(f"{free_gib:.1f} GiB of memory are free, {min_free_gib:g} needed")
    problems += [] if ports is None else port_problems(ports)
    versions = package_versions()
    found = 0
    if gpus:
        text, failure = query_gpus()
        found, driver, more = judge_gpus(text, gpus) if failure is None else (0, "absent", [failure])
        versions["NVIDIA driver"] = driver
        problems += more
        problems += [] if more else [*compute_problems(gpus), *kernel_problems()]
    return NodeReport(
        node=node,
        problems=problems,
        versions=versions,
        addresses=local_addresses(),
        gpus=found,
        cores=len(os.sched_getaffinity(0)),
        free_gib=round(free_gib, 1),
    )


def canary_problems(canary: Path) -> list[str]:
    """Whether this node sees the file that the batch host wrote; the report tests the other direction."""
    try:
        found = "" if canary.read_text().strip() else f"{canary} is empty"
    except OSError as error:
        found = f"{canary}: {error.strerror}"
    return [f"the shared file system differs from the batch host's: {found}"] if found else []


def port_problems(ports: PortBlock) -> list[str]:
    """Ports of the block that another program listens on."""
    taken = []
    for port in range(ports.first, ports.first_worker):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                taken.append(str(port))
    return [f"another program listens on port {', '.join(taken)} of the job's block"] if taken else []


def package_versions() -> dict[str, str]:
    """Versions of Python and of PACKAGES; `absent` if not installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def local_addresses() -> dict[str, str]:
    """IPv4 address -> network interface."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def interface_environment(interface: str) -> dict[str, str]:
    """Variables that make NCCL and gloo use this interface only."""
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}


def query_gpus() -> tuple[str, str | None]:
    """nvidia-smi's output, a line of _QUERY per GPU, and None; or "" and the reason why there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return "", "no nvidia-smi, so no GPU"
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi does not answer within {COMMAND_TIMEOUT_S:.0f} s"
    if answer.returncode:
        return "", f"nvidia-smi fails: {(answer.stderr or answer.stdout).strip()[:300]}"
    return answer.stdout, None


def judge_gpus(text: str, expected: int) -> tuple[int, str, list[str]]:
    """Number of GPUs, driver version and problems, from the output of query_gpus."""
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    problems = [] if len(lines) == expected else [f"{len(lines)} GPUs, {expected} expected"]
    driver = "absent"
    for line in lines:
        if len(line) != len(_QUERY):
            problems.append(f"nvidia-smi says of a GPU: {', '.join(line)[:300]}")
            continue
        index, used_mib, errors, driver = line
        if used_mib.isdigit() and int(used_mib) > MAX_USED_MIB:
            problems.append(f"GPU {index}: {used_mib} MiB are in use by another program")
        # GPUs without ECC answer [N/A].
        if errors.isdigit() and int(errors):
            problems.append(f"GPU {index}: {errors} uncorrected memory errors")
    return len(lines), driver, problems


def compute_problems(gpus: int) -> list[str]:
    """Multiply two matrices on each GPU and check the result."""
    import torch

    problems = []
    size = 2048
    for index in range(gpus):
        try:
            ones = torch.ones(size, size, device=f"cuda:{index}", dtype=torch.bfloat16)
            right = bool(((ones @ ones).float() == size).all())
        except (RuntimeError, AssertionError) as error:
            # torch built without CUDA raises AssertionError.
            problems.append(f"GPU {index}: {str(error).splitlines()[0]}")
            continue
        if not right:
            problems.append(f"GPU {index} multiplies matrices wrongly")
    return problems


def kernel_problems() -> list[str]:
    """Packages of the trainer that cannot do on this node's GPUs what a run needs."""
    from slimrl import device

    try:
        device.load_transformer_engine()
    except ValueError as error:
        return [str(error)]
    problem = device.attention_problem()
    return [problem] if problem else []


if __name__ == "__main__":
    main()
