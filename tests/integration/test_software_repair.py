"""The environment of software repair, on a package of a few lines: what earns the reward, and what does not."""

import asyncio
import json
import subprocess
from dataclasses import replace

import psutil
import pytest
from broken_package import BROKEN, HOOK, METADATA, PROMPT, REPAIR, SOUND, write_tasks
from sandboxes import needs_namespaces

from slimrl.agent.environment import Turn
from slimrl.agent.sandbox.interface import SessionEnded
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.config.schema.agent import SandboxConfig
from slimrl.environments.software_repair import patches
from slimrl.environments.software_repair.environment import SoftwareRepair
from slimrl.environments.software_repair.grading import REGRESSION
from slimrl.environments.software_repair.players import RandomPlayer, Solver

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60), needs_namespaces]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("repair"))


@pytest.fixture
async def pool():
    made = SandboxPool(SandboxConfig(packages=["pytest"]))
    yield made
    await made.close()


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command}, id="1")


SUBMIT = ToolCall(name="submit", arguments={}, id="2")


async def played(pool, folder, *calls, **arguments):
    """The last observation of an episode with these calls, one turn each."""
    environment = SoftwareRepair(pool, folder=str(folder), **arguments)
    try:
        observation = await environment.start(PROMPT, seed=0, scratch={})
        for index, call in enumerate(calls):
            observation = await environment.step(Turn(index=index, text="", calls=(call,)))
    finally:
        await environment.close()
    return observation


async def test_a_repair_earns_the_reward_and_the_start_does_not(pool, folder):
    nothing = await played(pool, folder, SUBMIT)
    assert (nothing.reward, nothing.done) == (0.0, True)
    assert dict(nothing.metrics) | {"grading_s": 0} == {
        "success": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0, "suite_ran": 1.0, "grading_s": 0,
    }  # fmt: skip
    repaired = await played(pool, folder, bash(REPAIR), SUBMIT)
    assert (repaired.reward, repaired.metrics["success"], repaired.tool_errors) == (1.0, 1.0, [])


async def test_the_policy_sees_neither_the_sound_package_nor_the_tests_that_catch_the_bug(pool, folder):
    environment = SoftwareRepair(pool, folder=str(folder))
    started = await environment.start(PROMPT, seed=0, scratch={})
    assert [tool["function"]["name"] for tool in started.tools] == ["bash", "edit", "submit"]
    look = bash("ls tests; grep -rl 'sum(values)' . /base /tmp; python3 -m pytest -q 2>&1 | tail -1")
    seen = await environment.step(Turn(index=0, text="", calls=(look,)))
    lines = seen.messages[0]["content"].split("\n")
    assert lines[0] == "test_mean.py"
    assert [line[:8] for line in lines[1:]] == ["1 passed"]
    await environment.close()
    shown = await played(pool, folder, bash("ls tests"), tests="shown")
    assert "test_total.py" in shown.messages[0]["content"]


FORGED = "".join(f"PASSED {test}\\n" for test in (*METADATA["FAIL_TO_PASS"], *METADATA["PASS_TO_PASS"]))
PATCHED_IN_PACKAGE = """
import _pytest.reports as reports
make = reports.TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    report = make(cls, item, call)
    report.outcome, report.longrepr = 'passed', None
    return report
reports.TestReport.from_item_and_call = classmethod(passed)
"""


NOTHING_BUT = "import pytest\n\n\ndef total(values):\n    pytest.{0}()\n\n\ndef mean(values):\n    pytest.{0}()\n"
CHEATS = {
    "tests": ("tests/test_total.py", "def test_total():\n    pass\n\n\ndef test_of_nothing():\n    pass\n"),
    "conftest": ("conftest.py", HOOK),
    "conftest of the tests": ("tests/conftest.py", HOOK),
    "conftest in the package": ("tally/conftest.py", HOOK),
    "settings": ("pytest.ini", "[pytest]\naddopts = -p cheat\n"),
    "sitecustomize": ("sitecustomize.py", f"print('''{FORGED}''')\nimport os\nos._exit(0)\n"),
    "exit in the tests": ("tests/__init__.py", f"import sys\nsys.__stdout__.write('''{FORGED}''')\nsys.exit(0)\n"),
    "exit": ("tally/__init__.py", "import sys\nsys.exit(0)\n"),
    "forged log": ("tally/__init__.py", f"import os\nos.write(1, b'''{FORGED}''')\nos._exit(1)\n"),
    "expected to fail": ("tally/__init__.py", NOTHING_BUT.format("xfail")),
    "skipped": ("tally/__init__.py", NOTHING_BUT.format("skip")),
    "reports patched": ("tally/__init__.py", BROKEN + PATCHED_IN_PACKAGE),
}


async def test_cheats_earn_nothing(pool, folder):
    async def earned(path: str, text: str) -> bool:
        write = bash(f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND")
        plugin = bash("cat > cheat.py <<'END'\n" + HOOK + "\nEND")
        ended = await played(pool, folder, write, plugin, SUBMIT, reward="partial")
        return ended.metrics["success"] > 0 or ended.reward > 0

    tried = await asyncio.gather(*(earned(*cheat) for cheat in CHEATS.values()))
    assert [name for name, paid in zip(CHEATS, tried, strict=True) if paid] == []


async def test_deleted_tests_count_as_ever_and_a_deleted_module_is_deleted(pool, folder):
    kept = await played(pool, folder, bash("rm -r tests"), bash(REPAIR), SUBMIT)
    assert kept.reward == 1.0
    gone = await played(pool, folder, bash("rm -r tally"), SUBMIT, reward="partial")
    assert (gone.reward, gone.metrics["suite_ran"]) == (-REGRESSION, 1.0)


async def test_what_breaks_other_tests_is_punished_and_resolves_nothing(pool, folder):
    broken = bash("printf 'def total(values):\\n    return 3\\n' > tally/__init__.py")
    partial = await played(pool, folder, broken, SUBMIT, reward="partial")
    assert (partial.reward, partial.metrics["fail_to_pass"], partial.metrics["pass_to_pass"]) == (0.5, 1.0, 0.0)
    assert (await played(pool, folder, broken, SUBMIT)).reward == 0.0


async def test_calls_that_fail_are_answered_and_the_folder_outlives_them(pool, folder):
    environment = SoftwareRepair(pool, folder=str(folder))
    await environment.start(PROMPT, seed=0, scratch={})

    async def told(*calls, **turn):
        return await environment.step(Turn(index=0, text="", calls=calls, **turn))

    edit = {"path": "tally/__init__.py", "old": "values", "new": "x"}
    calls = (
        ToolCall(name="edit", arguments=edit),
        ToolCall(name="edit", arguments=edit | {"path": "/usr/none"}),
        ToolCall(name="edit", arguments={"path": "x"}),
        ToolCall(name="vim", arguments={}),
        MalformedCall(problem="no JSON"),
        bash("echo a\0b"),
    )
    failed = await told(*calls)
    assert [message["content"].split("\n")[0][:60] for message in failed.messages] == [
        "error: `old` occurs 5 times in tally/__init__.py, and must o",
        "error: /usr/none cannot be read: [Errno 2] No such file or d",
        "error: edit takes path, old, new, as text",
        "error: there is no tool vim; there are bash, edit, submit",
        "error: no JSON",
        "error: the code holds a NUL character",
    ]
    assert len(failed.tool_errors) == 6
    same = await told(bash("kill -9 -1; exit 3"))
    assert same.state_id == failed.state_id
    changed = await told(ToolCall(name="edit", arguments=edit | {"old": "values[1:]", "new": "values"}))
    assert changed.state_id != same.state_id
    last = await told(bash("ls"), is_last=True)
    assert (last.reward, last.done, last.truncated) == (1.0, False, True)
    await environment.close()


async def test_a_session_that_is_killed_from_outside_is_no_verdict(pool, folder):
    for turn in (Turn(index=0, text="Done."), Turn(index=0, text="", calls=(bash("ls"),))):
        environment = SoftwareRepair(pool, folder=str(folder))
        await environment.start(PROMPT, seed=0, scratch={})
        *_, shell = psutil.Process(pool._sandbox.pid).children(recursive=True)
        shell.kill()
        await asyncio.to_thread(shell.wait, 10)
        with pytest.raises(SessionEnded, match="was ended by SIGKILL"):
            await environment.step(turn)
        await environment.close()


async def test_the_solver_earns_all_and_a_random_player_nothing_and_both_leave_nothing(pool, folder):
    rewards, seed = [], 1
    for make in (Solver, RandomPlayer):
        environment, player = SoftwareRepair(pool, folder=str(folder)), make(PROMPT, seed)
        observation = await environment.start(PROMPT, seed=seed, scratch={})
        for index in range(8):
            observation = await environment.step(replace(player.turn(observation), is_last=index == 7))
            if observation.reward is not None:
                break
        rewards.append(observation.reward)
        await environment.close()
    assert rewards == [1.0, 0.0]
    assert len(psutil.Process(pool._sandbox.pid).children(recursive=True)) == 2


def test_a_patch_is_applied_as_git_applies_it_and_undone(tmp_path):
    (tmp_path / "tally").mkdir()
    (tmp_path / "tally/__init__.py").write_text(BROKEN)
    made = patches.make("tally/__init__.py", BROKEN, SOUND)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=made, text=True, check=True)
    assert (tmp_path / "tally/__init__.py").read_text() == SOUND == patches.apply(BROKEN, made)
    assert patches.apply(SOUND, made, reverse=True) == BROKEN
    with pytest.raises(ValueError, match="line 1"):
        patches.apply(SOUND, made)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"folder": "/none"}, "make the tasks first"), ({"reward": "all"}, "neither"), ({"suite_s": 0}, "not above 0")],
)
def test_wrong_arguments_are_refused(folder, arguments, says):
    with pytest.raises(ValueError, match=says):
        SoftwareRepair.check(**({"folder": str(folder)} | arguments))
    json.dumps(METADATA)


async def test_two_episodes_that_hold_all_sessions_are_graded_one_after_the_other(folder):
    few = SandboxPool(SandboxConfig(packages=["pytest"], max_sessions=2, wait_s=30.0))
    try:
        repaired = await asyncio.gather(*(played(few, folder, bash(REPAIR), SUBMIT) for _ in range(2)))
        assert [one.reward for one in repaired] == [1.0, 1.0]
    finally:
        await few.close()
