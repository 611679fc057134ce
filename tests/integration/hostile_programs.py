"""Programs that try to break out, to overload the machine or to leave something: (name, language, code, how it ends).

A program prints ESCAPED, and nothing else of that name, if what it tried has worked. HOST_FILE, REPOSITORY, HOST_PID and
PORT are replaced with a secret file, the repository, a process and an open port of the host.
"""

# ruff: noqa: E501
ANY = None
"""It may end as it likes, but within its limits."""

LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"


def attempt(code: str) -> str:
    """A program that says ESCAPED if the code raises nothing."""
    lines = "\n    ".join(code.split("\n"))
    return f"try:\n    {lines}\n    print('ESCAPED')\nexcept (OSError, ImportError) as error:\n    print('refused', error)\n"


def call(number: int, *arguments: str) -> str:
    """A program that says ESCAPED if a system call does not fail with EPERM or ENOSYS."""
    words = ", ".join((str(number), *arguments))
    return (
        LIBC
        + f"r = libc.syscall({words}); e = ctypes.get_errno()\nprint('refused' if r == -1 and e in (1, 38) else 'ESCAPED', r, e)\n"
    )


PYTHON = {
    # Overload.
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", "timeout"),
    "fork bomb that waits": ("import os, time\ntry:\n    while True:\n        if not os.fork(): time.sleep(60)\nexcept OSError: print('refused')\n", "ok"),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n", "error"),
    "memory at once": ("bytearray(1 << 40)\n", "memory"),
    "memory that is only asked for": ("import mmap\ntry: mmap.mmap(-1, 1 << 28); print('ESCAPED')\nexcept OSError as e: print('refused', e)\n", "ok"),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(1 << 20))\n", "memory"),
    "memory of numpy": ("import numpy\nnumpy.ones(1 << 30)\n", "memory"),
    "memory of many processes": ("import os, time\nfor _ in range(6):\n    if not os.fork():\n        x = os.urandom(100 << 20); time.sleep(60)\ntime.sleep(60)\n", "memory"),
    "memory by mmap": ("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]\n", ANY),
    "disk in /tmp": ("with open('/tmp/x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))\n", "error"),
    "disk in many files": ("for i in range(10**6):\n    with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(1 << 18))\n", "error"),
    "disk in /dev/shm": ("for i in range(100):\n    with open(f'/dev/shm/{i}', 'wb') as f: f.write(bytes(1 << 20))\n", "error"),
    "inodes": ("import os\nfor i in range(10**6): os.mkdir(f'/tmp/{i}')\n", ANY),
    "deep folders": ("import os\nfor i in range(10**6):\n    os.mkdir('d'); os.chdir('d')\n", ANY),
    "endless output": ("while True: print('x' * 1000)\n", "output"),
    "endless errors": ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)\n", "output"),
    "output of many processes": ("import os\nfor _ in range(3): os.fork()\nwhile True: os.write(1, bytes(4096))\n", "output"),
    "endless loop": ("while True: pass\n", "timeout"),
    "endless loop that ignores signals": ("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass\n", "timeout"),
    "loop that catches all": ("while True:\n    try:\n        while True: pass\n    except BaseException: pass\n", "timeout"),
    "sleep": ("import time; time.sleep(60)\n", "timeout"),
    "loop within C": ("import re; re.match('(a+)+b', 'a' * 60)\n", "timeout"),
    "enormous number": ("print(len(str(7 ** (7 ** 9))))\n", ANY),
    "deep recursion": ("def f(): f()\nf()\n", "error"),
    "recursion within C": ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()\n", ANY),
    "nested source": ("eval('(' * 5000 + ')' * 5000)\n", ANY),
    "crash": ("import ctypes; ctypes.string_at(0)\n", "killed"),
    "abort": ("import os; os.abort()\n", "killed"),
    "many descriptors": ("import os\nwhile True: os.pipe()\n", "error"),
    "waits for stdin": ("print(repr(input()))\n", "error"),
    "waits for a thread that never ends": ("import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()\n", "timeout"),
    "enormous result": ("import sys; sys.stdout.write('x' * (1 << 24))\n", "output"),
    "binary output": ("import os; os.write(1, bytes(range(256)))\n", "ok"),
    "an exception that cannot be printed": ("class E(Exception):\n    def __str__(self): raise E\nraise E\n", "error"),
    "an object that cannot be pickled": ("raise Exception(lambda: 0, open('/dev/null'))\n", "error"),
    "closes its output": ("import os, sys; sys.stdout.close(); os.close(1); os.close(2)\n", ANY),
    "closes all descriptors": ("import os; os.closerange(0, 1 << 16)\n", ANY),
    "exits in a thread": ("import os, threading; threading.Thread(target=os._exit, args=(3,)).start()\nwhile True: pass\n", "error"),
    # The host.
    "environment": ("import os; print('ESCAPED' if 'SLIMRL_TEST_SECRET' in os.environ else 'nothing')\n", "ok"),
    "environment of the first process": ("print('ESCAPED' if b'SLIMRL_TEST_SECRET' in open('/proc/1/environ', 'rb').read() else 'nothing')\n", "ok"),
    "secret file": (attempt("open('HOST_FILE').read()"), "ok"),
    "secret file by a symbolic link": (attempt("import os\nos.symlink('HOST_FILE', '/tmp/l')\nopen('/tmp/l').read()"), "ok"),
    "secret file by a hard link": (attempt("import os\nos.link('HOST_FILE', '/tmp/l')"), "ok"),
    "secret file by the root of a process": (attempt("open('/proc/1/root/HOST_FILE').read()"), "ok"),
    "secret file by dots": (attempt("open('/proc/self/cwd/../../../../HOST_FILE').read()"), "ok"),
    "home": ("import os, sys\nn = os.listdir('HOME') if os.path.isdir('HOME') else []\nprint('ESCAPED' if set(n) - set(sys.base_prefix.split('/')) else 'nothing', n)\n", "ok"),
    "password file": (attempt("open('/etc/shadow').read()"), "ok"),
    "tests of the repository": (attempt("open('REPOSITORY/tests/conftest.py').read()"), "ok"),
    "rewards of the repository": (attempt("open('REPOSITORY/slimrl/rewards/math.py', 'a')"), "ok"),
    "imports rewards": (attempt("import slimrl.rewards.math"), "ok"),
    "writes beside the interpreter": (attempt("import os\nopen(os.__file__, 'a')"), "ok"),
    "writes to a package": (attempt("import numpy\nopen(numpy.__file__, 'a')"), "ok"),
    "writes to its sandbox's code": (attempt("open('/sandbox/slimrl/agent/sandbox/inside/zygote.py', 'a')"), "ok"),
    "writes to /": (attempt("open('/x', 'w')"), "ok"),
    "writes to /dev": (attempt("open('/dev/x', 'w')"), "ok"),
    "writes to /usr": (attempt("open('/usr/x', 'w')"), "ok"),
    "writes to /proc/sys": (attempt("open('/proc/sys/kernel/core_pattern', 'w').write('x')"), "ok"),
    "reads the kernel's memory": (attempt("open('/proc/kcore', 'rb').read(1)"), "ok"),
    "sysrq": (attempt("open('/proc/sysrq-trigger', 'w').write('b')"), "ok"),
    "makes a device": (attempt("import os, stat\nos.mknod('/tmp/d', stat.S_IFBLK | 0o666, os.makedev(254, 0))\nopen('/tmp/d', 'rb')"), "ok"),
    "lowers the chance of its end": (attempt("open('/proc/self/oom_score_adj', 'w').write('-1000')"), "ok"),
    # Network.
    "TCP to the host": (attempt("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)"), "ok"),
    "TCP to the world": (attempt("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)"), "ok"),
    "UDP": (attempt("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))"), "ok"),
    "IPv6": (attempt("import socket\nsocket.create_connection(('::1', PORT), 1)"), "ok"),
    "name lookup": (attempt("import socket\nsocket.getaddrinfo('example.org', 80)"), "ok"),
    "raw socket": (attempt("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"), "ok"),
    "packet socket": (attempt("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)"), "ok"),
    "urllib": (attempt("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT', timeout=1)"), "ok"),
    "unix socket of the host": (attempt("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')"), "ok"),
    "docker's socket": (attempt("import socket\nsocket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')"), "ok"),
    # Other processes and the kernel.
    "signal to a process of the host": (attempt("import os\nos.kill(HOST_PID, 9)"), "ok"),
    "signal to the parent": ("import os\nprint('ESCAPED' if os.getppid() else 'no parent')\n", "ok"),
    "signal to all": ("import os, signal\ntry: os.kill(-1, signal.SIGTERM)\nexcept OSError: pass\nprint('done')\n", "ok"),
    "processes in /proc": ("import os\npids = [p for p in os.listdir('/proc') if p.isdigit()]\nprint('ESCAPED' if pids != ['1'] else 'alone')\n", "ok"),
    "ptrace": (call(101, "16", "1", "0", "0"), "ok"),
    "process_vm_readv": (call(310, "1", "0", "0", "0", "0", "0"), "ok"),
    "unshare of a user namespace": (call(272, "0x10000000"), "ok"),
    "clone of a user namespace": (call(56, "0x10000011", "0", "0", "0", "0"), "ok"),
    "clone3": (call(435, "0", "0"), "ok"),
    "setns": (call(308, "0", "0"), "ok"),
    "mount": (call(165, "b'none'", "b'/tmp'", "b'tmpfs'", "0", "None"), "ok"),
    "unmounts /tmp": (call(166, "b'/tmp'", "2"), "ok"),
    "pivot_root": (call(155, "b'/tmp'", "b'/tmp'"), "ok"),
    "chroot": (call(161, "b'/tmp'"), "ok"),
    "keyctl": (call(250, "0", "-3", "0"), "ok"),
    "bpf": (call(321, "0", "0", "0"), "ok"),
    "perf_event_open": (call(298, "0", "0", "-1", "-1", "0"), "ok"),
    "userfaultfd": (call(323, "0"), "ok"),
    "io_uring": (call(425, "1", "0"), "ok"),
    "kexec": (call(246, "0", "0", "0", "0"), "ok"),
    "module": (call(175, "0", "0", "b''"), "ok"),
    "reboot": (call(169, "0xfee1dead", "672274793", "0x89abcdef", "0"), "ok"),
    "memory without a limit": (call(319, "b'x'", "0"), "ok"),
    "capabilities": ("for line in open('/proc/self/status'):\n    if line.startswith(('CapInh', 'CapPrm', 'CapEff', 'CapAmb')) and int(line.split()[1], 16): print('ESCAPED', line)\n", "ok"),
    "becomes root": (attempt("import os\nos.setuid(0)"), "ok"),
    "raises a limit": (attempt("import resource\ntry: resource.setrlimit(resource.RLIMIT_CPU, (99, 99))\nexcept ValueError as error: raise OSError from error"), "ok"),
    # What it leaves.
    "orphan": ("import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(60)\n    os._exit(0)\nprint('done')\n", "ok"),
    "daemon that ignores signals": ("import os, signal, time\nif not os.fork():\n    os.setsid(); signal.signal(15, signal.SIG_IGN); signal.signal(1, signal.SIG_IGN)\n    while True: time.sleep(1)\nprint('done')\n", "ok"),
    "changes modules": ("import builtins, json, math, os, sys\nbuiltins.print = None; math.sqrt = len; json.dumps = None; os.environ['LEFT'] = '1'; sys.modules['re'] = None\n", "ok"),
    "leaves files": ("import os\nfor p in ('/tmp/left', '/dev/shm/left'): open(p, 'w').write('x')\n", "ok"),
}  # fmt: skip

SHELL = {
    "shell fork bomb": (":(){ :|:& };:; wait\n", ANY),
    "shell endless output": ("yes\n", "output"),
    "shell background process": ("sleep 60 & sleep 60 & disown -a; echo done\n", "ok"),
    "shell nohup": ("nohup setsid sleep 60 >/dev/null 2>&1 & echo done\n", "ok"),
    "shell fills the disk": ("dd if=/dev/zero of=/tmp/x bs=1M count=1000 2>/dev/null\n", "error"),
    "shell removes all": ("rm -rf --no-preserve-root / 2>/dev/null; test -e /usr/bin/env && echo still there\n", ANY),
    "shell secret file": ("cat HOST_FILE && echo ESCAPED; true\n", "ok"),
    "shell becomes root": ("su -c 'echo ESCAPED' </dev/null; sudo -n echo ESCAPED; true\n", "ok"),
    "shell unshare": ("unshare --user --map-root-user echo ESCAPED; true\n", "ok"),
    "shell TCP": ("exec 3<>/dev/tcp/127.0.0.1/PORT && echo ESCAPED; true\n", ANY),
    "shell kills all": ("kill -9 -1; echo done\n", ANY),
    "shell waits for stdin": ("read x || echo nothing\n", "ok"),
}  # fmt: skip
