"""Program that keeps a headless chromium running, and leaves nothing of it when it ends: `chromium_keeper.py FOLDER`.

1. chromium's profile and temporary files are in FOLDER, which the starting process made.
2. When chromium takes connections, the address of its DevTools is in FOLDER/endpoint. The first time, this process
   says so with a line on its standard output: empty, or what went wrong.
3. A chromium that ends is started anew, at another address.
4. When the standard input ends, and so with the process that started it, chromium is ended and FOLDER is removed.

It runs outside slimrl, so it needs the standard library alone.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROGRAM = "chromium"
READY_S = 60.0
END_S = 5.0
RETRY_S = 2.0
"""Pause before chromium is started anew that did not start"""
_LOOK_S = 0.02
"""Time between looks at a file or a process that something is awaited of"""
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
"""Options of prctl(2)"""

ARGUMENTS = (
    "--headless", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    # As playwright does: chromium's own sandbox needs privileges that containers lack. The pages are the package's.
    "--no-sandbox",
    # No page may reach another host.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    # Pages of other trajectories are in the background, where timers would be slow.
    "--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-extensions", "--disable-sync", "--disable-breakpad", "--disable-component-update",
    "--disable-background-networking", "--disable-default-apps", "--password-store=basic",
    # A process more for each page, which waits for the next address.
    "--disable-features=SpareRendererForSitePerProcess,Translate,MediaRouter,OptimizationHints",
)  # fmt: skip


def main() -> None:
    folder, libc = Path(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_SUBREAPER, 1)
    said = False
    try:
        while True:
            shutil.rmtree(folder / "run", ignore_errors=True)
            process = _start(folder / "run", libc)
            try:
                endpoint = _endpoint(process, folder / "run")
                (folder / "endpoint.new").write_text(endpoint)
                os.replace(folder / "endpoint.new", folder / "endpoint")
                if not said:
                    print(flush=True)
                    said = True
                if not _ends_first(process):
                    return
            except OSError as error:
                if not said:
                    print(" ".join(str(error).split()), flush=True)
                    return
                print(f"chromium could not be started anew: {error}", file=sys.stderr, flush=True)
                if select.select([sys.stdin], [], [], RETRY_S)[0]:
                    return
            finally:
                _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(run: Path, libc: ctypes.CDLL) -> subprocess.Popen[bytes]:
    run.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    with (run / "output").open("wb") as output:
        return subprocess.Popen(
            [PROGRAM, *ARGUMENTS, f"--user-data-dir={run / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env | {"TMPDIR": str(run), "HOME": str(run)},
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL),
        )


def _endpoint(process: subprocess.Popen[bytes], run: Path) -> str:
    """Address of the DevTools.

    Raises:
        OSError: chromium does not start.
    """
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            lines = (run / "profile" / "DevToolsActivePort").read_text().splitlines()
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(_LOOK_S)
    tail = (run / "output").read_text(errors="replace")[-1000:]
    raise OSError(f"{PROGRAM} did not start (exit code {process.poll()}): {tail}")


def _ends_first(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of chromium (True) or of the standard input (False)."""
    handle = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([sys.stdin, handle], [], [])
    finally:
        os.close(handle)
    return sys.stdin not in ready


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + END_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:  # its own children, which the kernel made this process's
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
