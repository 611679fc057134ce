"""The filter of system calls (seccomp, x86-64), as a classic BPF program.

1. Another architecture (32-bit calls) kills the process; the x32 numbers are refused.
2. `clone` with a flag that makes a namespace is refused; `clone3`, whose flags a filter cannot read, does not exist
   (ENOSYS), so that libc falls back to `clone`.
3. The calls of DENIED are refused with EPERM, the others allowed.
"""

import errno
import struct

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET"""
CLONE = 56
CLONE3 = 435

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
}  # fmt: skip
"""What has to do with other processes, namespaces, mounts, keys, the kernel, clocks and devices; and kernel objects
whose memory no limit counts (System V IPC, memfd). Numbers of x86-64."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data."""
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def program() -> bytes:
    """The filter as an array of struct sock_filter."""
    rules = [(_AT_LEAST, X32_BIT, "refuse"), (_EQUAL, CLONE, "clone"), (_EQUAL, CLONE3, "missing")]
    rules += [(_EQUAL, number, "refuse") for number in sorted(DENIED.values())]
    tail = [
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, NEW_NAMESPACES),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    places = {"clone": 1, "refuse": 4, "missing": 5}
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        # A jump is relative to the next line, and at most 255 lines long.
        *(
            (test, len(rules) - place - 1 + places[target], 0, value)
            for place, (test, value, target) in enumerate(rules)
        ),
        *tail,
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
