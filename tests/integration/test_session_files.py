"""Files of an open session: what is put in, what changed, programs beside it, and the copy that sessions share."""

import asyncio
import base64
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from sandboxes import SMALL, needs_namespaces, processes_inside
from test_sandboxes import CONFIG, ROOMY, container  # noqa: F401 - a fixture

from slimrl.agent.sandbox.base_folders import BaseFolders, remove_left_folders
from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.agent.sandbox.interface import Ended, FileChange, Language, Program, SandboxError, SessionEnded
from slimrl.agent.sandbox.pool import SandboxPool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]
FILES = {
    "kept.txt": b"same\n",
    "inner/edited.txt": b"one\ntwo\nthree",
    "gone.txt": b"x\n",
    "empty.txt": b"",
    "data.bin": bytes(range(256)),
    "old name.txt": "ä\n".encode(),
}
EDITS = (
    "sed -i s/two/2/ inner/edited.txt; rm gone.txt empty.txt; printf 9 >> data.bin; mv 'old name.txt' new; "
    "mkdir -p a/b; echo 1 > a/b/c; : > a/nothing; ln -s kept.txt link; mkdir __pycache__; echo > __pycache__/x.pyc"
)


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "folder"


@pytest.fixture(params=[pytest.param("overlay", marks=needs_namespaces), pytest.param("copy", marks=needs_namespaces)])
async def sandbox(request):
    """bubblewrap, with overlays and as on kernels without them."""
    made = BubblewrapSandbox(CONFIG)
    client = await made.start()
    if request.param == "overlay" and not client.overlay:
        pytest.skip("the kernel takes no overlay over a tmpfs here")
    client.overlay = request.param == "overlay"
    yield made
    await made.close()


async def test_a_diff_of_a_session_is_what_git_makes_of_the_same_edits(sandbox, folder, tmp_path):
    session = await sandbox.session(Language.shell, folder=folder)
    assert (await session.run(EDITS)).ended is Ended.ok
    ours = await session.diff()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "."], cwd=folder, check=True)
    subprocess.run(["bash", "-c", EDITS], cwd=folder, check=True)
    (folder / ".git/info/exclude").write_text("__pycache__\n")
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    theirs = subprocess.run(
        ["git", "-c", "core.quotePath=false", "diff", "--no-renames", "HEAD"],
        cwd=folder,
        capture_output=True,
        check=True,
    ).stdout.decode()
    theirs = "\n".join(line for line in theirs.split("\n") if not line.startswith("index "))
    # git ends a name with a space in it by a tab in the lines with --- and +++.
    assert ours == theirs.replace(".txt\t\n", ".txt\n")


async def test_what_changed_has_the_contents_of_both_sides(sandbox, folder):
    session = await sandbox.session(Language.shell, folder=folder)
    assert await session.changed() == {}
    await session.run(EDITS)
    changed = await session.changed()
    assert changed["data.bin"] == FileChange(before=FILES["data.bin"], after=FILES["data.bin"] + b"9")
    assert changed["empty.txt"] == FileChange(before=b"", after=None)
    assert changed["a/nothing"] == FileChange(before=None, after=b"")
    assert changed["link"] == FileChange(before=None, after=b"kept.txt")
    assert {"kept.txt", "__pycache__/x.pyc"} & changed.keys() == set()


async def test_files_are_put_into_an_open_session(sandbox, folder):
    session = await sandbox.session(Language.shell, folder=folder)
    await session.put({"deep/down/f.bin": b"\0\xff", "kept.txt": b"other\n"})
    told = await session.run("base64 deep/down/f.bin; cat kept.txt; echo more >> kept.txt; cat kept.txt")
    assert told.stdout == base64.b64encode(b"\0\xff").decode() + "\nother\nother\nmore\n"
    assert (folder / "kept.txt").read_bytes() == b"same\n"
    for path in ("/tmp/x", "../x", "a/../../x", ""):
        with pytest.raises(ValueError, match="within the session's folder"):
            await session.put({path: b""})
    with pytest.raises(SandboxError, match="cannot be read or written"):
        await session.put({"large": bytes(2 * SMALL.disk_bytes)})
    await session.close()
    with pytest.raises(SessionEnded):
        await session.put({"a": b""})


@needs_namespaces
async def test_a_program_beside_a_session_has_its_files_and_limits_of_its_own(folder):
    sandbox = BubblewrapSandbox(CONFIG)
    session = await sandbox.session(Language.shell, folder=folder, limits=replace(ROOMY, cpu_s=1))
    await session.run("NAME=there; echo changed > kept.txt; mkdir -p sub; cd sub; sleep 60 & :")
    shown = await session.run_program(
        Program(code="pwd; cat kept.txt; echo $NAME; cat", language=Language.shell, stdin=b"in")
    )
    assert shown.stdout == "/tmp/work\nchanged\n\nin"
    burn = Program(code="import time\nwhile time.process_time() < 1.2: pass\nopen('of-it', 'w').write('made')")
    assert (await session.run_program(burn)).ended is Ended.timeout
    assert (await session.run_program(burn, replace(ROOMY, cpu_s=5))).ended is Ended.ok
    assert (await session.run_program(Program(code="while 1: pass"), replace(ROOMY, wall_s=0.2))).ended is Ended.timeout
    seen = Program(code="import os; print([n for n in os.listdir('/proc') if n.isdigit()])")
    assert (await session.run_program(seen)).stdout == "['1']\n"
    assert (await session.run("pwd; cat ../of-it; echo $NAME")).stdout == "/tmp/work/sub\nmadethere\n"
    await sandbox.close()


async def test_a_program_that_ended_its_session_ends_what_is_asked_of_it(sandbox, folder):
    session = await sandbox.session(Language.shell, folder=folder)
    await session.run("exec sleep 0")
    for ask in (session.diff, session.changed):
        with pytest.raises(SessionEnded):
            await ask()
    other = await sandbox.session(Language.shell)
    with pytest.raises(ValueError, match="began without a folder"):
        await other.diff()


@needs_namespaces
async def test_sessions_share_one_copy_which_none_of_them_sees_the_others_through(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret.txt").write_text("solution")
    sandbox = BubblewrapSandbox(CONFIG)
    first = await sandbox.session(Language.shell, folder=other)
    sessions = [await sandbox.session(Language.shell, folder=folder) for _ in range(3)]
    assert len(list(sandbox._folders.root.iterdir())) == 2
    await sessions[0].run("echo mine > kept.txt; rm -r inner; mkdir inner")
    assert (await sessions[1].run("cat kept.txt; ls inner /base; grep -r solution /base /tmp")).stdout == (
        "same\n/base:\n\ninner:\nedited.txt\n"
    )
    beside = Program(code="import os; print(os.listdir('/base'))")
    assert (await sessions[1].run_program(beside)).stdout == (await sandbox.run(beside)).stdout == "[]\n"
    assert set(await sessions[0].changed()) == {"kept.txt", "inner/edited.txt"}
    (folder / "kept.txt").write_text("new\n")
    late = await sandbox.session(Language.shell, folder=folder)
    assert (await late.run("cat kept.txt")).stdout == "new\n"
    assert (await sessions[2].run("cat kept.txt")).stdout == "same\n"
    for session in (first, late, *sessions):
        await session.close()
    root = sandbox._folders.root
    assert processes_inside(sandbox) == 2
    await sandbox.close()
    assert not root.exists()


@needs_namespaces
async def test_a_session_that_waits_takes_no_processor_time_and_goes_on_with_its_next_code(folder):
    sandbox = BubblewrapSandbox(CONFIG)
    session = await sandbox.session(folder=folder)
    await session.run("import threading, time\nticks = []\ndef tick():\n  while 1: ticks.append(1); time.sleep(0.01)\n")
    await session.run("threading.Thread(target=tick, daemon=True).start()")
    before = int((await session.run("print(len(ticks))")).stdout)
    await asyncio.sleep(0.5)
    (process,) = psutil.Process(sandbox.pid).children(recursive=True)[2:]
    assert process.status() == psutil.STATUS_STOPPED
    assert int((await session.run("print(len(ticks))")).stdout) - before < 25
    assert int((await session.run("time.sleep(0.5); print(len(ticks))")).stdout) - before > 25
    await sandbox.close()


@needs_namespaces
async def test_python_on_a_shell_s_path_has_the_packages_and_their_commands(folder):
    pool = SandboxPool(replace(CONFIG, packages=["pytest"]))
    shell = await pool.session(Language.shell, folder=folder)
    await shell.put({"test_a.py": b"def test_a():\n    assert True\n"})
    for command in ("python3 -m pytest", "pytest"):
        told = await shell.run(f"{command} -q test_a.py 2>&1 | tail -1")
        assert told.stdout.startswith("1 passed"), told
    version = (
        "import sys, importlib.util as u; print(sys.version_info[:3], u.find_spec('torch'), u.find_spec('slimrl'))"
    )
    assert (await shell.run(f'python3 -c "{version}"')).stdout == f"{sys.version_info[:3]} None None\n"
    await pool.close()


async def test_a_container_has_the_same_and_refuses_larger_limits_of_the_kernel(container, folder):  # noqa: F811
    sandbox, log = container
    session = await sandbox.session(Language.shell, folder=folder)
    work = Path(log).parent / "work"
    # The stand-in runs commands where it is itself: in the folder where the programs of the container find it.
    run = session._execute

    async def there(program, limits):
        code = f"import os\nos.chdir({str(work)!r})\n{program.code}"
        return await run(replace(program, code=code) if program.language is Language.python else program, limits)

    session._execute = there
    await session.put({"a/b.txt": b"put\n"})
    assert (work / "a/b.txt").read_text() == "put\n"
    (work / "kept.txt").write_text("edited\n")
    assert set(await session.changed()) == {"a/b.txt", "kept.txt"}
    assert "+edited\n" in await session.diff()
    with pytest.raises(SandboxError, match="no larger cpu_s"):
        await session.run_program(Program(code=""), replace(ROOMY, cpu_s=10**6))


def test_copies_of_a_process_that_was_killed_are_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = "import os, signal; from slimrl.agent.sandbox.base_folders import BaseFolders; kept = BaseFolders(); {}"
    for end in ("os.kill(os.getpid(), signal.SIGKILL)", "pass"):
        subprocess.run([sys.executable, "-c", code.format(end)], check=False, timeout=60)
        # Not closed, but ended as processes do.
        assert len(list(tmp_path.iterdir())) == (1 if "kill" in end else 0)
    subprocess.run([sys.executable, "-c", code.format("os.kill(os.getpid(), signal.SIGKILL)")], check=False, timeout=60)
    used = BaseFolders()
    (folder,) = tmp_path.iterdir()
    remove_left_folders()
    assert folder.is_dir()
    used.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_session_that_gives_up_waiting_for_the_copy_leaves_it_to_the_others(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("text")
    copy = shutil.copytree

    def slow(*args, **kwargs):
        time.sleep(0.5)
        return copy(*args, **kwargs)

    monkeypatch.setattr("shutil.copytree", slow)
    folders = BaseFolders()
    try:
        first = asyncio.ensure_future(folders.take(tmp_path / "folder"))
        await asyncio.sleep(0.2)
        second = asyncio.ensure_future(folders.take(tmp_path / "folder"))
        await asyncio.sleep(0.1)
        first.cancel()
        name = await second
        assert (folders.root / name / "file").read_text() == "text"
        assert await folders.take(tmp_path / "folder") == name
    finally:
        folders.close()


async def test_a_folder_that_cannot_be_copied_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    folders = BaseFolders()
    try:
        with monkeypatch.context() as broken:
            broken.setattr("shutil.copytree", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full")))
            with pytest.raises(OSError, match="full"):
                await folders.take(tmp_path / "folder")
        assert await folders.take(tmp_path / "folder")
    finally:
        folders.close()
