"""The filter of system calls (seccomp, x86-64), as a classic BPF program.

1. Another architecture (32-bit calls) kills the process; the x32 numbers are refused.
2. The calls of BY_ARGUMENTS are refused with some arguments: `clone` with a flag that makes a namespace, or a thread
   with open files of its own; anonymous memory that is shared, and pages of the host's pool of huge pages; families of
   sockets besides FAMILIES; larger buffers of sockets and pipes, filters of sockets, and huge pages for the process.
3. The calls of MISSING do not exist (ENOSYS), so that programs use others: of `clone3`, whose flags a filter cannot
   read, libc uses `clone`.
4. The calls of DENIED are refused with EPERM, the others allowed.

Together with the limits of confine.py, what is left can take the host's memory only where memory.py sees it.
"""

import errno
import struct

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET"""
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
"""Families of sockets that a program may make: AF_UNIX, and those of the run's network namespace, which reach
nothing."""
MISSING = {"clone3": 435, "splice": 275, "tee": 276, "vmsplice": 278, "sendfile": 40}
"""System calls that fail as if the kernel lacked them. The latter four let pipes and sockets hold pages that count
nowhere."""

DENIED = {
    "semget": 64, "shmget": 29, "msgget": 68, "mq_open": 240, "memfd_create": 319, "memfd_secret": 447,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312,
    "pidfd_getfd": 438, "perf_event_open": 298, "userfaultfd": 323, "bpf": 321, "lookup_dcookie": 212,
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "kexec_load": 246, "kexec_file_load": 320, "create_module": 174, "init_module": 175, "delete_module": 176,
    "finit_module": 313, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179,
    "quotactl_fd": 443, "syslog": 103, "sethostname": 170, "setdomainname": 171, "settimeofday": 164,
    "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "iopl": 172, "ioperm": 173, "modify_ldt": 154,
    "personality": 135, "uselib": 134, "vhangup": 153, "nfsservctl": 180,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "fanotify_init": 300, "migrate_pages": 256,
    "move_pages": 279, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "io_setup": 206, "inotify_init": 253, "inotify_init1": 294, "landlock_create_ruleset": 444,
    "sync": 162, "syncfs": 306,
}  # fmt: skip
"""What has to do with other processes, namespaces, mounts, keys, the kernel, clocks, devices and the host's disks; and
kernel objects whose memory no limit counts (System V IPC, memfd, events of folders, rules of landlock) or that are the
whole host's (contexts of asynchronous I/O). Numbers of x86-64."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, (16, 24, 32, 40)
"""Offsets in struct seccomp_data; of arguments the lower half, which is all that the calls below use."""
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_THREAD, _FILES = 0x10000, 0x400
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 1, 0x20, 0x40000
_SOL_SOCKET = 1
_SOCKET_OPTIONS = (7, 8, 32, 33, 26, 50, 51, 52)
"""SO_SNDBUF, SO_RCVBUF and both FORCE; SO_ATTACH_FILTER, SO_ATTACH_BPF, and the same of SO_ATTACH_REUSEPORT."""
_F_SETPIPE_SZ, _PR_SET_THP_DISABLE = 1031, 41

_Line = tuple[int, int, str, str]
"""Instruction, its operand, and where it goes on if its test is true or not; "" for the next line."""
_BLOCKS: dict[str, list[_Line]] = {
    "clone": [
        (_LOAD, _ARGUMENTS[0], "", ""),
        (_ANY_BIT, NEW_NAMESPACES, "refuse", ""),
        (_ANY_BIT, _THREAD, "", "allow"),
        (_ANY_BIT, _FILES, "allow", "refuse"),
    ],
    "mmap": [
        (_LOAD, _ARGUMENTS[3], "", ""),
        (_ANY_BIT, _MAP_HUGETLB, "refuse", ""),
        (_ANY_BIT, _MAP_ANONYMOUS, "", "allow"),
        (_ANY_BIT, _MAP_SHARED, "refuse", "allow"),
    ],
    "socket": [
        (_LOAD, _ARGUMENTS[0], "", ""),
        *((_EQUAL, family, "allow", "") for family in FAMILIES.values()),
        (_RETURN, _ERRNO | errno.EAFNOSUPPORT, "", ""),
    ],
    "setsockopt": [
        (_LOAD, _ARGUMENTS[1], "", ""),
        (_EQUAL, _SOL_SOCKET, "", "allow"),
        (_LOAD, _ARGUMENTS[2], "", ""),
        *((_EQUAL, option, "refuse", "") for option in _SOCKET_OPTIONS),
        (_RETURN, _ALLOW, "", ""),
    ],
    "fcntl": [(_LOAD, _ARGUMENTS[1], "", ""), (_EQUAL, _F_SETPIPE_SZ, "refuse", "allow")],
    "prctl": [(_LOAD, _ARGUMENTS[0], "", ""), (_EQUAL, _PR_SET_THP_DISABLE, "refuse", "allow")],
    "allow": [(_RETURN, _ALLOW, "", "")],
    "refuse": [(_RETURN, _ERRNO | errno.EPERM, "", "")],
    "missing": [(_RETURN, _ERRNO | errno.ENOSYS, "", "")],
}
BY_ARGUMENTS = {"clone": 56, "mmap": 9, "socket": 41, "socketpair": 53, "setsockopt": 54, "fcntl": 72, "prctl": 157}


def program() -> bytes:
    """The filter as an array of struct sock_filter."""
    lines: list[_Line] = [
        (_LOAD, _ARCH, "", ""),
        (_EQUAL, AUDIT_ARCH_X86_64, "", "kill"),
        (_LOAD, _NUMBER, "", ""),
        (_AT_LEAST, X32_BIT, "refuse", ""),
        *((_EQUAL, number, "socket" if name == "socketpair" else name, "") for name, number in BY_ARGUMENTS.items()),
        *((_EQUAL, number, "missing", "") for number in MISSING.values()),
        *((_EQUAL, number, "refuse", "") for number in sorted(DENIED.values())),
        (_RETURN, _ALLOW, "", ""),
    ]
    places = {}
    for name, block in (_BLOCKS | {"kill": [(_RETURN, _KILL_PROCESS, "", "")]}).items():
        places[name] = len(lines)
        lines += block
    # A jump is relative to the next line, and at most 255 lines long.
    return b"".join(
        struct.pack("<HBBI", code, *(places[to] - place - 1 if to else 0 for to in (true, false)), operand)
        for place, (code, operand, true, false) in enumerate(lines)
    )
