"""Which processes the guard takes for a cluster's: by TMPDIR, as the kernel has their environment."""

from types import SimpleNamespace

import psutil

from slimrl.runtime import guard


def test_a_process_that_wiped_the_beginning_of_its_environment_is_found_by_what_is_left(monkeypatch, tmp_path):
    """As Ray's agents do, whose titles are written over it."""
    own = f"TMPDIR={tmp_path}".encode()
    environments = {
        "/proc/4000001/environ": b"A=1\0" + own + b"\0",
        "/proc/4000002/environ": bytes(300) + own + b"\0PATH=/bin\0",
        "/proc/4000003/environ": own + b"/below\0",
        "/proc/4000004/environ": None,
        "/proc/4000005/environ": own + b"\0",
    }

    def read(path: str) -> SimpleNamespace:
        def read_bytes() -> bytes:
            if environments[path] is None:
                raise PermissionError(path)
            return environments[path]

        return SimpleNamespace(read_bytes=read_bytes)

    def process(pid: int) -> SimpleNamespace:
        status = psutil.STATUS_ZOMBIE if pid == 4000005 else psutil.STATUS_SLEEPING
        return SimpleNamespace(pid=pid, status=lambda: status)

    monkeypatch.setattr(guard, "Path", read)
    monkeypatch.setattr(psutil, "process_iter", lambda: [process(4000000 + number) for number in range(1, 6)])
    assert [found.pid for found in guard.members(tmp_path)] == [4000001, 4000002]
