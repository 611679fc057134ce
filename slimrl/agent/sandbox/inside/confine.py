"""What a fork of the warm interpreter does before it runs a program, as process 1 of a new pid namespace.

1. New mount, network, IPC and UTS namespaces. A fresh tmpfs is /tmp and /dev/shm, /proc is that of the new pid
   namespace and read-only; the rest was read-only before. A session's folder is an overlay over one that others share,
   whose changes are in the tmpfs. A program beside a session has the session's mounts instead.
2. Resource limits, and no huge pages, so that a page fault takes one page. If the warm interpreter is root of its user
   namespace, another user.
3. A new user namespace, which owns none of the others, with one unprivileged user; then no capabilities, no new
   privileges, and the filter of system calls.

Nothing here undoes a step: a failure ends the process before it runs the program.
"""

import ctypes
import os
import resource

from slimrl.agent.sandbox.inside import seccomp
from slimrl.agent.sandbox.inside.files import BASE

EMPTY = "/empty"
"""An empty folder."""
WORK = "/tmp/work"
"""Folder with the private copy of a session's folder."""
USER = 65534
"""User and group of a program, as it sees them."""
RUN_USERS = range(1, 1001)
"""The users and groups of runs in the warm interpreter's user namespace, if that has more than one."""
OPEN_FILES = 256
PENDING_SIGNALS = 1024
TMPFS_INODES = 20_000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 1, 2, 4, 8, 4096
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 4, 22, 38, 41
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """The kernel's struct sock_fprog: a BPF program and its length"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_FILTER = seccomp.program()


def confine(
    limits: dict[str, int], user: int, *, base: str = "", beside: int | None = None, sees_base: bool = False
) -> None:
    """Take from this process all that a program must not have. Raises OSError.

    Args:
        limits: the fields of Limits, with `address_space_bytes` in place of memory.
        user: one of RUN_USERS.
        base: name of the folder in BASE over which a session works.
        beside: descriptor of the mount namespace of a session in whose files this process works.
        sees_base: whether it sees that session's folder as it was at first, at BASE, which programs do not.
    """
    host_proc = os.open("/proc", os.O_PATH)
    _write(host_proc, "oom_score_adj", "1000")  # the kernel ends programs before it ends the training
    if beside is not None:
        os.setns(beside, os.CLONE_NEWNS)
        os.close(beside)
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
    if beside is None:
        _mount_private(limits["disk_bytes"], base)
    elif sees_base:
        _call("umount2", BASE.encode(), 0)
    _mount("proc", "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    os.chdir("/tmp")
    _limit(limits)
    _call("prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # its files in /proc are its own again
    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER)
    _write(host_proc, "setgroups", "deny")
    _write(host_proc, "gid_map", f"{USER} {group} 1")
    _write(host_proc, "uid_map", f"{USER} {user} 1")
    os.close(host_proc)
    # The new user namespace counts its own processes; before, the limit would have counted those of all runs.
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    _drop_capabilities()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_system_calls()


def overlay_works() -> bool:
    """Whether the kernel takes overlays here, whose changes are in a tmpfs; asked in a fork."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    status = 1
    try:
        os.unshare(os.CLONE_NEWNS)
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, None)
        os.makedirs("/tmp/lower/folder")
        os.mkdir("/tmp/there")
        _mount_overlay("/tmp/lower", "/tmp/there")
        os.rmdir("/tmp/there/folder")
        os.mkdir("/tmp/there/folder")  # needs attributes of the tmpfs, which came with Linux 6.6
        status = 0
    except OSError:
        pass  # what the kernel refuses is the answer
    finally:
        os._exit(status)


def _mount_private(disk_bytes: int, base: str) -> None:
    options = f"size={disk_bytes},nr_inodes={TMPFS_INODES},mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for name in ("shm", "tmp"):
        os.mkdir(f"/tmp/{name}")
        os.chmod(f"/tmp/{name}", 0o1777)
    _mount("/tmp/shm", "/dev/shm", None, _MS_BIND, None)
    if base:
        os.mkdir("/tmp/tmp/work")
        _mount_overlay(f"{BASE}/{base}", "/tmp/tmp/work")
        _mount(f"{BASE}/{base}", BASE, None, _MS_BIND, None)
    # The folders of other sessions are hidden, and the session's own below its changes.
    _mount(EMPTY, BASE, None, _MS_BIND, None)
    _mount("/tmp/tmp", "/tmp", None, _MS_BIND | _MS_REC, None)


def _mount_overlay(lower: str, target: str) -> None:
    """Show a folder so that everybody may change it; the changes are on the tmpfs at /tmp."""
    for name in ("upper", "overlay"):
        os.mkdir(f"/tmp/{name}")
    os.chmod("/tmp/upper", 0o777)
    options = f"lowerdir={lower},upperdir=/tmp/upper,workdir=/tmp/overlay,userxattr"
    _mount("overlay", target, "overlay", _MS_NOSUID | _MS_NODEV, options)


def _limit(limits: dict[str, int]) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["address_space_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS),
    ):
        resource.setrlimit(kind, (value, value))


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _filter_system_calls() -> None:
    program = _Program(len(_FILTER) // 8, _FILTER)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
