"""What a job decides without a cluster: ports, nodes, scripts, commands."""

import argparse
import ast
import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.engines.servers.ports import FIRST_PORT
from slimrl.launch import allreduce_probe, ray_node, slurm
from slimrl.launch.allreduce_probe import AllReduceProbe
from slimrl.launch.attempt import AttemptFolder
from slimrl.launch.options import add_options, train_command
from slimrl.launch.ports import NAMED, NUM_BLOCKS, port_block
from slimrl.launch.preflight import canary_problems, judge_gpus, port_problems
from slimrl.launch.reports import LaunchError, NodeReport, Selection, read_reports, select_nodes, write_report
from slimrl.launch.slurm import Allocation, srun_command
from slimrl.launch.submit import MARGIN_S, SIGNAL_S, SlurmJob, nodes_needed

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("launch", "tests/integration/fake_slurm")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.read_bytes().startswith(b"#!/bin/bash")
)
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
BIN = Path(sys.prefix) / "bin"

TINY = [
    "recipes/tiny_moe/gspo_calculator.yaml",
    *("trainer.num_ranks=16", "trainer.parallel.expert=2", "rollout.num_engines=4", "resync.transport=p2p"),
]


def report(node: str, *problems: str, **versions: str) -> NodeReport:
    return NodeReport(node=node, problems=list(problems), versions={"torch": "2.13.0", **versions})


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def test_blocks_of_ports_are_below_what_slimrl_and_the_kernel_hand_out_and_differ_from_job_to_job():
    blocks = [port_block(job_id) for job_id in range(123456, 123456 + NUM_BLOCKS)]
    ports = [port for block in blocks for port in range(block.first, block.last + 1)]
    assert len(ports) == len(set(ports))
    assert min(ports) > 1024
    assert max(ports) < FIRST_PORT < 32768
    assert port_block(7) == port_block(7)
    assert len({port_block(7, lane) for lane in range(NUM_BLOCKS)}) == NUM_BLOCKS
    assert max(blocks[0].port(name) for name in NAMED) < blocks[0].first_worker
    with pytest.raises(LaunchError, match="11 nodes of the job have one address"):
        port_block(7, 10)


def test_bad_nodes_are_named_and_spares_take_their_place():
    nodes = ["a", "b", "c", "d", "e"]
    reports = {r.node: r for r in [report("b", "GPU 3 is lost"), report("c"), report("d", torch="2.12.0"), report("e")]}
    silent = dict.fromkeys(nodes, "sent no report")
    selection = select_nodes(nodes, reports, needed=2, unreported=silent)
    assert selection.used == ["c", "e"]
    assert selection.bad == {
        "a": "sent no report",
        "b": "GPU 3 is lost",
        "d": "torch is 2.12.0, on most nodes 2.13.0",
    }
    with pytest.raises(LaunchError, match=r"2 of 5 nodes are good, 3 needed \(2 spare\).\n  a: .*\n  b: GPU 3 is lost"):
        select_nodes(nodes, reports, needed=3, unreported=silent)


def test_a_report_is_read_as_it_was_written(tmp_path: Path):
    written = NodeReport("n1", ["p"], {"ray": "2"}, {"10.0.0.1": "ib0"}, 8, 96, 1000.5)
    write_report(tmp_path, written)
    assert read_reports(tmp_path) == {"n1": written}


def test_gpus_are_judged_by_number_memory_and_errors():
    lines = "0, 4, 0, 580.65\n1, 70123, 0, 580.65\n2, 4, 2, 580.65\n3, 4, [N/A], 580.65\n"
    assert judge_gpus(lines, 8) == (
        4,
        "580.65",
        [
            "4 GPUs, 8 expected",
            "GPU 1: 70123 MiB are in use by another program",
            "GPU 2: 2 uncorrected memory errors",
        ],
    )
    assert judge_gpus("0, 4, 0, 580.65\n", 1) == (1, "580.65", [])


def test_a_port_that_is_taken_and_a_file_that_is_not_there_are_problems(tmp_path: Path):
    import socket

    block = port_block(3)
    with socket.socket() as server:
        server.bind(("", block.port("gcs")))
        server.listen()
        assert port_problems(block) == [f"another program listens on port {block.port('gcs')} of the job's block"]
    assert port_problems(block) == []
    assert "No such file" in canary_problems(tmp_path / "canary")[0]
    (tmp_path / "canary").write_text("x\n")
    assert canary_problems(tmp_path / "canary") == []


def test_ray_starts_at_the_plans_address_with_the_ports_of_its_block():
    first = port_block(4321).first
    node = {"address": "10.0.0.2", "interface": "ib0", "cores": 96}
    plan = {
        "ray_address": f"10.0.0.1:{first}",
        "token_file": "/shared/token",
        "gpus": 8,
        "object_store_bytes": 2**30,
        "nodes": {"a": {**node, "rank": 0, "first_port": first}, "b": {**node, "rank": 1, "first_port": first}},
    }
    head, other = (ray_node.ray_command(plan, name, Path("/tmp/x")) for name in "ab")
    assert "--head" in head
    assert not any(text.startswith("--address") for text in head)
    assert f"--address=10.0.0.1:{first}" in other
    assert "auto" not in " ".join(head + other)
    ports = [int(n) for text in head for n in re.findall(r"-port=(\d+)", text)]
    assert all(first <= port < first + 500 for port in ports)
    environment = ray_node.ray_environment(plan, "a", Path("/tmp/x"))
    assert environment["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/shared/token"
    assert environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
    assert "RAY_ADDRESS" not in environment


def test_the_command_is_told_its_job_and_what_to_do_with_a_run_of_another():
    def command(*arguments: str) -> list[str]:
        return train_command(options(*arguments), 77, Path("/logs/checkpoints"))

    of_job = ["--job=77", "--checkpoint-log=/logs/checkpoints"]
    assert command("--overwrite", "r.yaml", "a=1")[-5:] == ["r.yaml", "a=1", *of_job, "--overwrite"]
    assert command("--sft", "r.yaml")[1:] == ["-m", "slimrl.cli", "sft", "r.yaml", *of_job]
    assert command("--command", "python", "-c", "1") == ["python", "-c", "1"]
    assert command("--container", "i.sqsh", "r.yaml")[0] == "python3"


def test_what_a_script_leaves_out_is_what_a_job_has_by_default():
    plain, job = options("r.yaml"), SlurmJob(nodes=1)
    same = {"spares", "gpus_per_node", "log_dir", "cores_per_node", "sft", "resume", "overwrite"}
    assert {name: getattr(plain, name) for name in same} == {name: getattr(job, name) for name in same}
    assert plain.grace_s == SIGNAL_S - MARGIN_S == 240
    assert (plain.venv, plain.container, plain.command) == (Path(".venv"), None, False)
    assert (plain.min_free_gib, plain.object_store_gib) == (8.0, 16.0)
    assert (plain.preflight_timeout_s, plain.allreduce_timeout_s) == (300.0, 180.0)


def test_steps_run_in_the_container_with_one_task_on_each_node():
    contained = options("--container", "i.sqsh", "--container-mounts", "/data:/data", "r.yaml")
    command = srun_command(contained, ["a", "b"], Path("ray.%N.log"), "slimrl.launch.ray_node", ["-x"])
    assert {"--nodelist=a,b", "--ntasks=2", "--kill-on-bad-exit=1", "--overlap", "--gpus-per-node=8"} <= set(command)
    assert f"--container-mounts={Path.cwd()}:{Path.cwd()},/tmp:/tmp,/data:/data" in command
    assert command[-4:] == ["python3", "-m", "slimrl.launch.ray_node", "-x"]


def test_as_many_nodes_are_needed_as_places_for_ranks_and_engines_make():
    recipe = Recipe()
    recipe.trainer.num_ranks, recipe.rollout.num_engines, recipe.rollout.engine_tp = 16, 4, 2
    recipe.resync.transport = TransportName.p2p
    assert nodes_needed(recipe, 8, sft=False) == 3
    assert nodes_needed(recipe, 8, sft=True) == 2
    recipe.rollout.colocated = True
    assert nodes_needed(recipe, 8, sft=False) == 2
    # A teacher has GPUs of its own, even where engines share those of the trainer.
    recipe.teacher.path, recipe.teacher.engine_tp = "teacher", 8
    assert (nodes_needed(recipe, 8, sft=False), nodes_needed(recipe, 8, sft=True)) == (3, 2)
    recipe.teacher.path, recipe.teacher.engine_tp = "", 1
    recipe.rollout.engine_tp = 16
    with pytest.raises(ValueError, match=r"no number of nodes with 8 GPUs is enough: rollout.engine_tp = 16"):
        nodes_needed(recipe, 8, sft=False)


class ProbeWithBadNodes(AllReduceProbe):
    """A group passes if it has no bad node, or one node only: the network of bad nodes is broken.

    Every node has one address, and two share one machine's.
    """

    def __init__(self, tmp_path: Path, nodes: list[str], bad: set[str]) -> None:
        allocation = Allocation(77, 0, nodes, {node: node for node in nodes})
        reports = {node: NodeReport(node, cores=4) for node in nodes}
        folder = AttemptFolder(tmp_path)
        super().__init__(folder, allocation, options("r.yaml"), reports, lambda: False)
        self._bad = bad

    def _run_groups(self, groups):
        good = [node for group in groups if len(group) == 1 or not self._bad & set(group) for node in group]
        return {node: NodeReport(node, addresses={f"10.0.0.{node[1]}": "ib0"}) for node in good}


@pytest.mark.parametrize(
    ("count", "bad"),
    [
        *((count, {f"n{index}"}) for count in (3, 4, 6, 9) for index in range(count)),
        (10, {"n1", "n3"}),
        (5, {"n0", "n4"}),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else value,
)
def test_nodes_that_no_other_reaches_are_left_out_and_spares_take_their_places(
    tmp_path: Path, count: int, bad: set[str]
):
    nodes = [f"n{index}" for index in range(count)]
    met = ProbeWithBadNodes(tmp_path, nodes, bad).run(Selection(nodes[: count - len(bad)], {}))
    assert met.nodes == [node for node in nodes if node not in bad]


def test_spares_stay_unused_while_the_first_nodes_pass(tmp_path: Path):
    nodes = ["n0", "n1", "n2", "n3"]
    assert ProbeWithBadNodes(tmp_path, nodes, set()).run(Selection(nodes[:2], {})).nodes == ["n0", "n1"]
    left_out = ProbeWithBadNodes(tmp_path, nodes, set()).run(Selection(["n1", "n3"], {"n0": "full"}))
    assert left_out.nodes == ["n1", "n2"]


def test_a_round_gives_each_group_a_port_and_all_of_them_a_deadline(tmp_path: Path, monkeypatch):
    started, waits = [], []
    probe = ProbeWithBadNodes(tmp_path, ["n0", "n1", "n2", "n3"], set())
    probe._options = options("--gpus-per-node", "4", "--allreduce-timeout-s", "50", "--venv", "/v", "r.yaml")

    def start(folder, given, name, nodes, module, *arguments, **how):
        assert given is probe._options
        started.append((folder, name, nodes, module, arguments, how))
        write_report(tmp_path / name, NodeReport("n1", addresses={"10.0.0.1": "ib0"}))
        return SimpleNamespace(wait=lambda *asked: waits.append(asked))

    monkeypatch.setattr(allreduce_probe, "start_step", start)
    for number, groups in enumerate([[["n0", "n1"], ["n3", "n2"]], [["n1"]]]):
        assert list(AllReduceProbe._run_groups(probe, groups)) == ["n1"]
        (folder, name, nodes, module, arguments, how) = started[number]
        assert (folder.path, name, nodes) == (tmp_path, f"allreduce_{number}", [node for g in groups for node in g])
        plan = tmp_path / name / "groups.plan"
        assert (module, how) == ("slimrl.launch.allreduce", {"stop_together": False})
        assert arguments == (f"--plan={plan}", "--gpus=4", "--timeout-s=50.0")
        first = port_block(77).port("preflight")
        assert json.loads(plan.read_text())["groups"] == [
            {"nodes": group, "hosts": {node: node for node in group}, "port": first + index}
            for index, group in enumerate(groups)
        ]
    assert waits == [(50.0 + 60.0, probe._stop)] * 2


def test_the_plan_says_what_every_node_needs(tmp_path: Path):
    probe = ProbeWithBadNodes(tmp_path, ["n1", "n2"], set()).run(Selection(["n1", "n2"], {}))
    first = port_block(77).first
    own = {"interface": "ib0", "first_port": first, "cores": 4}
    assert probe.plan() == {
        "job_id": 77, "ray_address": f"10.0.0.1:{first}",
        "token_file": str(tmp_path / "token"), "gpus": 8, "object_store_bytes": 16 * 2**30,
        "nodes": {"n1": {"rank": 0, "address": "10.0.0.1", **own}, "n2": {"rank": 1, "address": "10.0.0.2", **own}},
    }  # fmt: skip
    probe._options = options("--cores-per-node", "3", "--object-store-gib", "0.5", "r.yaml")
    plan = probe.plan()
    assert [own["cores"] for own in plan["nodes"].values()] == [3, 3]
    assert plan["object_store_bytes"] == 2**29


def test_more_nodes_of_one_address_than_there_are_ports_for_end_the_job(tmp_path: Path):
    nodes = [f"n1{letter}" for letter in "abcdefghijk"]
    with pytest.raises(LaunchError, match="11 nodes of the job have one address"):
        ProbeWithBadNodes(tmp_path, nodes, set()).run(Selection(nodes, {})).plan()


def test_where_every_pair_passes_the_nodes_without_a_report_are_named(tmp_path: Path):
    nodes = ["n0", "n1", "n2"]

    class FailsBeyondPairs(ProbeWithBadNodes):
        def _run_groups(self, groups):
            all_of = super()._run_groups(groups)
            return {node: all_of[node] for group in groups for node in (group[:2] if len(group) > 2 else group)}

    with pytest.raises(LaunchError, match=r"all-reduce of 3 nodes failed, but every node passes in a pair") as said:
        FailsBeyondPairs(tmp_path, nodes, set()).run(Selection(nodes, {}))
    assert "No report came from n2. Logs: " in str(said.value)


def test_a_node_that_fails_alone_is_replaced_by_the_next(tmp_path: Path):
    class AloneOnly(ProbeWithBadNodes):
        def _run_groups(self, groups):
            return {} if groups == [["n0"]] else super()._run_groups(groups)

    assert AloneOnly(tmp_path, ["n0", "n1"], set()).run(Selection(["n0"], {})).nodes == ["n1"]


def test_where_good_nodes_are_too_few_or_no_node_can_be_blamed_the_job_ends(tmp_path: Path):
    nodes = ["n0", "n1", "n2", "n3"]
    with pytest.raises(LaunchError, match="all-reduce: n2 failed; 3 good nodes are left, 4 needed"):
        ProbeWithBadNodes(tmp_path, nodes, {"n2"}).run(Selection(nodes, {}))
    with pytest.raises(LaunchError, match="of 2 nodes failed, but no pair of nodes passes either"):
        ProbeWithBadNodes(tmp_path, nodes[:2], {"n1"}).run(Selection(nodes[:2], {}))


def test_a_job_that_its_user_cancelled_is_not_queued_again(monkeypatch):
    asked = []
    states = iter(["CANCELLED", "RUNNING"])

    def answer(*command: str) -> str:
        asked.append(command)
        return f"JobId=7 JobName=x JobState={next(states)} Reason=None" if "show" in command else ""

    monkeypatch.setattr(slurm, "_ask", answer)
    with pytest.raises(LaunchError, match="the job is CANCELLED, so it is not requeued"):
        slurm.requeue(7)
    assert ("scontrol", "requeue", "7") not in asked
    slurm.requeue(7)
    assert asked[-1] == ("scontrol", "requeue", "7")


def test_the_plan_gives_nodes_of_one_address_ports_of_their_own(tmp_path: Path):
    probe = ProbeWithBadNodes(tmp_path, ["n1", "n1b", "n2"], set())
    plan = probe.run(Selection(["n1", "n1b", "n2"], {})).plan()
    ports = {node: own["first_port"] for node, own in plan["nodes"].items()}
    assert ports == {"n1": port_block(77).first, "n1b": port_block(77, 1).first, "n2": port_block(77).first}
    assert plan["ray_address"] == f"10.0.0.1:{port_block(77).port('gcs')}"
    assert [own["rank"] for own in plan["nodes"].values()] == [0, 1, 2]


def test_what_runs_on_the_batch_host_needs_the_standard_library_alone():
    seen: set[str] = set()
    waiting = ["slimrl.launch.job"]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            # zip(strict=...) came with Python 3.10.
            assert not (isinstance(node, ast.keyword) and node.arg == "strict"), f"{module}: strict="
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "slimrl"}, f"{module} imports {name}"
                if name.startswith("slimrl.") and name not in seen:
                    waiting.append(name)
    assert {"slimrl.launch.slurm", "slimrl.launch.reports", "slimrl.launch.allreduce_probe"} <= seen


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path):
    answer = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, timeout=30, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(dockerfile: Path):
    answer = subprocess.run([BIN / "hadolint", dockerfile], capture_output=True, text=True, timeout=30, check=False)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_dockerfiles_pin_images_by_version_and_packages_by_equality():
    assert len(DOCKERFILES) == 2
    for dockerfile in DOCKERFILES:
        text = dockerfile.read_text().replace("\\\n", " ")
        for image in re.findall(r"^FROM (\S+)", text, re.M):
            assert re.search(r":v?\d+\.\d+\.\d+", image), image
        for line in re.findall(r"pip install ([^&\n]*)", text):
            words = [
                word
                for word in line.split()
                if word != "." and not word.startswith("-") and "/" not in word and ".txt" not in word
            ]
            assert all("==" in word for word in words), line


def test_the_cuda_image_has_what_rays_http_server_needs():
    wanted = [Requirement(text) for text in requires("ray")]
    names = {package.name for package in wanted if package.marker and package.marker.evaluate({"extra": "default"})}
    names -= {package.name for package in wanted if not package.marker}
    # What SGLang brings, itself or by one of its packages.
    there = {canonicalize_name(Requirement(text).name) for text in requires("sglang")} | {"grpcio"}
    text = (ROOT / "docker" / "Dockerfile.cuda").read_text()
    installed = {canonicalize_name(name) for name in re.findall(r"([\w.-]+)==", text)}
    assert {canonicalize_name(name) for name in names} <= installed | there


def test_the_ray_job_for_kubernetes_has_the_fields_that_kuberay_reads():
    job = yaml.safe_load((ROOT / "launch" / "kuberay" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] > 0
    assert "--resume-or-start" in spec["entrypoint"]
    assert "auto" not in spec["entrypoint"]
    pins = (ROOT / "requirements" / "slimrl.txt").read_text()
    cluster = spec["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in pins
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        assert container["image"] == groups[0]["template"]["spec"]["containers"][0]["image"]
        limits = container["resources"]["limits"]
        assert {"cpu", "memory", "nvidia.com/gpu"} <= set(limits)
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        assert {"shm", "shared"} <= mounts
    assert all(group["minReplicas"] == group["maxReplicas"] == group["replicas"] for group in groups[1:])


def launch(*arguments: str):
    return CliRunner().invoke(app, ["launch", "slurm", *arguments])


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """Overrides that point the tiny recipe to files that are there."""
    from slimrl_tools.toy.toy import ToySize, write_toy

    write_toy("qwen3_moe", tmp_path / "model", ToySize(layers=1, hidden=32, moe_intermediate=16), 0)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "1"}], "answer": "1"}) + "\n")
    return [f"model.path={tmp_path / 'model'}", f"data.train={data}", f"data.eval.heldout={data}"]


def test_nodes_that_the_run_keeps_free_are_asked_for_beside_spares(task: list[str]):
    given = ["--nodes", "3", "--spares", "1", "--spare-nodes", "2", "--dry-run"]
    for arguments in (given, [*given[:4], "trainer.spare_nodes=2", "--dry-run"]):
        lines = launch(*TINY, *task, *arguments).stdout.splitlines()
        assert "#SBATCH --nodes=6" in lines
        assert lines[-1].endswith(" trainer.spare_nodes=2")
        # So that neither SLURM nor the job ends with a lost node.
        assert "#SBATCH --no-kill" in lines
        assert " --spare-nodes 2 " in lines[-1]


def test_a_dry_run_prints_the_script_that_would_be_submitted(task: list[str], tmp_path: Path):
    result = launch(
        *TINY, *task, "--nodes", "3", "--spares", "1", "--partition", "big", "--time", "4:00:00", "--dry-run"
    )
    assert result.exit_code == 0, result.output
    script = result.stdout
    lines = script.splitlines()
    assert {"#SBATCH --nodes=4", "#SBATCH --partition=big", "#SBATCH --time=4:00:00"} <= set(lines)
    assert {"#SBATCH --signal=B:USR1@300", "#SBATCH --requeue", "#SBATCH --gpus-per-node=8"} <= set(lines)
    assert "--spares 1 " in lines[-1]
    assert "#SBATCH --no-kill" not in lines
    assert lines[-1].endswith(f"{' '.join([*TINY, *task])}")
    # What is not about this job is as in the script that is submitted by hand.
    by_hand = (ROOT / "launch" / "slurm" / "train.sbatch").read_text().splitlines()
    assert by_hand[-3:-1] == lines[-3:-1]
    assert by_hand[-1].split('"$@"')[0].strip() == lines[-1].split(" --spares")[0]
    own = {line for line in by_hand if line.startswith("#SBATCH") and "job-name" not in line and "output" not in line}
    assert own <= set(lines)
    file = tmp_path / "script.sh"
    file.write_text(script)
    checked = subprocess.run([BIN / "shellcheck", file], capture_output=True, text=True, timeout=30, check=False)
    assert checked.stdout == ""


def test_a_machine_without_model_and_data_writes_the_script_but_does_not_submit_it(tmp_path: Path):
    known = [
        "recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml",
        *("model.path=/cluster/Qwen3-30B-A3B", "data.train=/cluster/train.jsonl"),
    ]
    dry = launch(*known, "--nodes", "1", "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert dry.stdout.startswith("#!/bin/bash\n")
    assert "warning" not in dry.stdout
    assert "data.train: warning: /cluster/train.jsonl: no such file." in dry.stderr
    assert "model.path: warning: /cluster/Qwen3-30B-A3B: Qwen3-30B-A3B as published, in bfloat16, for" in dry.stderr
    # The rules know the published model.
    wrong = launch(*known, "trainer.parallel.tensor=3", "--nodes", "1", "--dry-run")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "trainer.parallel.tensor: " in wrong.stderr
    submitted = launch(*known, "--nodes", "1", "--log-dir", str(tmp_path / "logs"))
    assert submitted.exit_code == 2
    assert "model.path: /cluster/Qwen3-30B-A3B: no such folder." in submitted.stderr
    assert not (tmp_path / "logs").exists()


def test_a_job_that_is_too_small_or_a_recipe_that_is_wrong_is_not_submitted(task: list[str]):
    small = launch(*TINY, *task, "--nodes", "2", "--gpus-per-node", "4", "--dry-run")
    assert small.exit_code == 2
    assert "needs 5 nodes of 4 GPUs; --nodes 2 is too few." in small.output
    wrong = launch(*TINY, *task, "algorithm.clip_hgih=1", "--nodes", "2", "--dry-run")
    assert wrong.exit_code == 2
    assert "Did you mean algorithm.clip_high" in wrong.output
