"""The environment of SWE-bench in real containers of an image that is laid out as the published ones: what earns the
reward, and what does not."""

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace

import pytest
from podman_image import podman_command
from swe_bench_image import IMAGE, import_image, instance
from venvs import environment_python

from slimrl.agent.environment import Turn
from slimrl.agent.isolation.interpreter import call_elsewhere
from slimrl.agent.sandbox.interface import SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_call import ToolCall
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig, SandboxLimits
from slimrl.data.prompts import read_prompts
from slimrl.environments.software_repair.grading import REGRESSION
from slimrl.environments.swe_bench.environment import SweBench
from slimrl.environments.swe_bench.players import RandomPlayer, Solver

# Importing the image takes five seconds, each episode with its verdict three to six.
pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(400)]
REPAIR = "sed -i 's/values\\[1:\\]/values/' tally/__init__.py"
SUBMIT = ToolCall(name="submit", arguments={}, id="2")
WRITTEN = "mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    return podman_command(tmp_path_factory)


@pytest.fixture(scope="module")
def folder(command, tmp_path_factory):
    """The data of the task, made of a file as it is published, with its image there."""
    python = environment_python("swe_bench")
    made = tmp_path_factory.mktemp("swe")
    (made / "repository").mkdir()
    rows = [instance(made / "repository")]
    rows.append(rows[0] | {"instance_id": "swe-bench__tally-2"})
    import_image(made / "repository")
    shutil.rmtree(made / "repository")
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "module": "slimrl.environments.swe_bench.data", "out": str(made / "data"), "num": 1, "heldout": 1, "seed": 0,
        "options": {"dataset": str(made / "rows.jsonl")},
    }  # fmt: skip
    call_elsewhere(python, "slimrl.environments.write_data:write", arguments, 60.0)
    return made / "data"


@pytest.fixture
async def pool(command):
    made = SandboxPool(SandboxConfig(backend=SandboxBackend.container, command=command, wait_s=120.0))
    yield made
    await made.close()
    listed = subprocess.run(["podman", "ps", "--all"], capture_output=True, text=True, check=True).stdout
    assert "slimrl-" not in listed


def bash(text: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": text}, id="1")


async def played(pool, folder, *calls, **arguments):
    """The last observation of an episode with these calls, one turn each."""
    environment = SweBench(pool, folder=str(folder), **arguments)
    try:
        observation = await environment.start(read_prompts(folder / "train.jsonl", {})[0], seed=0, scratch={})
        for index, call in enumerate(calls):
            observation = await environment.step(Turn(index=index, text="", calls=(call,)))
    finally:
        await environment.close()
    return observation


async def test_a_repair_earns_the_reward_and_the_start_does_not(pool, folder):
    nothing, useless, repaired = await asyncio.gather(
        played(pool, folder, SUBMIT),
        played(pool, folder, bash("echo '# seen' >> tally/__init__.py; git commit -qam seen"), SUBMIT),
        played(pool, folder, bash(REPAIR), SUBMIT),
    )
    seen = {name: (one.reward, *dict(one.metrics).values()) for name, one in
            (("nothing", nothing), ("useless", useless), ("repaired", repaired))}  # fmt: skip
    assert {name: values[:6] for name, values in seen.items()} == {
        # reward, success, resolved, fail_to_pass, pass_to_pass, suite_ran
        "nothing": (0.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        "useless": (0.0, 0.0, 0.0, 0.0, 1.0, 1.0),
        "repaired": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    }
    assert repaired.done
    assert not repaired.tool_errors


async def test_the_players_earn_all_and_nothing(pool, folder):
    rewards = []
    prompt = read_prompts(folder / "train.jsonl", {})[0]
    for make in (Solver, RandomPlayer):
        environment, player = SweBench(pool, folder=str(folder)), make(prompt, 1)
        observation = await environment.start(prompt, seed=1, scratch={})
        for index in range(4):
            observation = await environment.step(replace(player.turn(observation), is_last=index == 3))
            if observation.reward is not None:
                break
        rewards.append(observation.reward)
        await environment.close()
    assert rewards == [1.0, 0.0]


HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
"""
FORGED = "\\n".join(
    f"PASSED tests/{test}"
    for test in ("test_total.py::test_total", "test_total.py::test_of_nothing", "test_mean.py::test_mean")
)
NOTHING_BUT = "import pytest\n\n\ndef total(values):\n    pytest.{0}()\n\n\ndef mean(values):\n    pytest.{0}()\n"
CHEATS = {
    "tests": ("tests/test_total.py", "def test_total():\n    pass\n\n\ndef test_of_nothing():\n    pass\n"),
    "conftest": ("conftest.py", HOOK),
    "conftest of the tests": ("tests/conftest.py", HOOK),
    "settings": ("setup.cfg", "[tool:pytest]\naddopts = -p cheat -p no:cacheprovider\n"),
    "settings of its own": ("pytest.ini", "[pytest]\naddopts = -p cheat\n"),
    "sitecustomize": ("sitecustomize.py", f"print('''{FORGED}''')\nimport os\nos._exit(0)\n"),
    "exit": ("tally/__init__.py", "import sys\nsys.exit(0)\n"),
    "expected to fail": ("tally/__init__.py", NOTHING_BUT.format("xfail")),
    "skipped": ("tally/__init__.py", NOTHING_BUT.format("skip")),
}
ENDS = {
    "repository deleted": "rm -rf /testbed",
    "history deleted": "rm -rf .git",
    "container stopped": "kill -9 -1; kill -9 1",
    "git replaced": "printf '#!/bin/sh\\necho no patch\\n' > /usr/bin/git",
}


async def test_cheats_earn_nothing(pool, folder):
    one_at_a_time = asyncio.Semaphore(3)

    async def earned(*commands: str) -> bool:
        async with one_at_a_time:
            calls = [*map(bash, commands), SUBMIT]
            ended = await played(pool, folder, *calls, reward="partial")
        return ended.metrics["success"] > 0 or ended.reward > 0

    plugin = WRITTEN.format(path="cheat.py", text=HOOK)
    tried = [earned(WRITTEN.format(path=path, text=text), plugin) for path, text in CHEATS.values()]
    tried += [earned(REPAIR, command) for command in ENDS.values()]
    paid = await asyncio.gather(*tried)
    assert [name for name, was in zip([*CHEATS, *ENDS], paid, strict=True) if was] == []


async def test_what_breaks_other_tests_is_punished(pool, folder):
    broken = bash("printf 'def total(values):\\n    return 3\\n' > tally/__init__.py")
    partial = await played(pool, folder, broken, SUBMIT, reward="partial")
    assert (partial.reward, partial.metrics["fail_to_pass"], partial.metrics["pass_to_pass"]) == (
        1.0 - REGRESSION, 1.0, 0.0,
    )  # fmt: skip


async def test_the_container_is_the_images_own_without_a_network_and_outlives_late_commands(pool, folder):
    environment = SweBench(pool, folder=str(folder), command_s=2)
    await environment.start(read_prompts(folder / "train.jsonl", {})[0], seed=0, scratch={})

    async def told(*calls, **turn):
        observation = await environment.step(Turn(index=0, text="", calls=calls, **turn))
        return [message["content"] for message in observation.messages], observation

    connect = "python -c \"import socket; socket.create_connection(('1.1.1.1', 80), 5)\""
    edit = {"path": "tally/__init__.py", "old": "values[1:]", "new": "values"}
    said, _ = await told(
        bash('pwd; echo $CONDA_DEFAULT_ENV $HOME; command -v python; git log --format=%s; ls'),
        bash(connect),
        bash("sleep 60 & echo started"),
        bash("echo before; sleep 60"),
        bash("head -c 1000000 /dev/zero | tr '\\0' x; python -c \"print('y' * 1000000)\""),
        bash("exit 3"),
        ToolCall(name="edit", arguments=edit),
    )  # fmt: skip
    assert said[0].split("\n") == [
        "/testbed", "testbed /root", "/opt/miniconda3/envs/testbed/bin/python", "SWE-bench", "base",
        "left.txt", "setup.cfg", "tally", "tests",
    ]  # fmt: skip
    assert "Network is unreachable" in said[1]
    assert said[2] == "started"
    assert said[3].startswith("before")
    assert "stopped: it ran for 2 s" in said[3]
    assert len(said[4]) < 70_000
    assert said[5] == "exit status 3"
    assert said[6] == "tally/__init__.py was edited"
    _, last = await told(bash("git diff --stat"), is_last=True)
    assert (last.reward, last.done, last.truncated) == (1.0, False, True)
    await environment.close()


async def test_tests_that_take_too_long_earn_nothing_and_leave_no_container(pool, folder):
    slow = bash(f"{REPAIR}; printf '\\nimport time\\ntime.sleep(100)\\n' >> tally/__init__.py")
    late = await played(pool, folder, slow, SUBMIT, suite_s=5)
    assert (late.reward, late.metrics["suite_ran"]) == (0.0, 0.0)
    assert late.metrics["grading_s"] < 60


def test_images_that_are_not_here_are_told_before_a_run(command, folder, tmp_path):
    pool = SandboxPool(SandboxConfig(backend=SandboxBackend.container, command=command))
    SweBench.check(pool, folder=str(folder))
    (tmp_path / "images.txt").write_text(f"{IMAGE}\nswebench/no-such-image:latest\n")
    with pytest.raises(ValueError, match=r"1 of the 2 images in .* not on this machine: swebench/no-such-image:latest"):
        SweBench.check(pool, folder=str(tmp_path))


async def test_an_image_that_is_not_here_is_not_pulled(pool):
    with pytest.raises(SandboxError, match="there is no image swebench/no-such-image:latest on this machine"):
        await pool.image_session("swebench/no-such-image:latest", SandboxLimits())
