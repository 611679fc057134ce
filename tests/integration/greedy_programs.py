"""Programs that take the host's memory by every route, will not end, or disturb the runs beside them.

NAME -> Python code. Each is behind PRELUDE, with its names. It says ESCAPED if it has got what no program may have.
"""

PRELUDE = '''
import array, ctypes, fcntl, mmap, os, resource, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
MIB = 1 << 20
SHARED, PRIVATE, ANONYMOUS = 1, 2, 0x20
kept = []

def take(size, flags=PRIVATE | ANONYMOUS, file=-1):
    """Address of so many bytes that are written to; raises OSError."""
    at = libc.mmap(None, size, 3, flags, file, 0)
    if at in (None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), "mmap")
    libc.memset(at, 1, size)
    return at

def forks(count, work):
    """Run work(number) in so many children that then stay, as far as processes can be had, and stay too."""
    for number in range(count):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            try: work(number)
            except OSError: pass
            stay()
    stay()

def stay():
    while True: time.sleep(60)

def repeat(work):
    """Until it is refused."""
    try:
        while True: work()
    except (OSError, MemoryError): pass

def fill(one, piece=bytes(4096)):
    """Write until no more goes in."""
    one.setblocking(False)
    try:
        while True: one.send(piece)
    except OSError: pass
'''

MEMORY = {
    "shared mappings of seven forks": "forks(7, lambda _: take(LIMIT * 15 // 16, SHARED | ANONYMOUS))",
    "full socket pairs": """
def work(_):
    def pair():
        kept.append(socket.socketpair())
        fill(kept[-1][0]); fill(kept[-1][1])
    repeat(pair)
forks(30, work)
""",
    "shared mappings of which one page stays": """
def work():
    at = take(64 * MIB, SHARED | ANONYMOUS)
    libc.munmap(at + 4096, 64 * MIB - 4096)
for _ in range(40): work()
stay()
""",
    "shared mappings of the zero device": """
def work(_):
    file = os.open("/dev/zero", os.O_RDWR)
    while True:
        at = take(64 * MIB, SHARED, file)
        libc.munmap(at + 4096, 64 * MIB - 4096)
forks(4, work)
""",
    "shared mappings that ended children have filled": """
for _ in range(8):
    size = LIMIT // 8
    at = libc.mmap(None, size, 3, SHARED | ANONYMOUS, -1, 0)
    for part in range(4):
        pid = os.fork()
        if pid == 0:
            libc.memset(at, 1, size)
            if part == 3:
                libc.munmap(at + 4096, size - 4096); stay()
            os._exit(0)
stay()
""",
    "private memory of all forks at once": "forks(31, lambda _: take(LIMIT // 4))",
    "private memory of a burst": """
go, wait = os.pipe()
def work(_):
    os.read(go, 1)
    take(LIMIT // 4)
if os.fork() == 0:
    time.sleep(1.5); os.write(wait, bytes(64)); stay()
forks(30, work)
""",
    "populated at once by all forks": """
def work(_):
    at = libc.mmap(None, LIMIT // 4, 3, PRIVATE | ANONYMOUS, -1, 0)
    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(LIMIT // 4), 23)
forks(31, work)
""",
    "huge pages of all forks": """
def work(_):
    size = LIMIT // 3
    at = libc.mmap(None, size, 3, PRIVATE | ANONYMOUS, -1, 0)
    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), 14)
    libc.memset(at, 1, size)
forks(31, work)
""",
    "copies of what forks inherit": """
at = take(LIMIT * 3 // 5)
forks(31, lambda _: libc.memset(at, 2, LIMIT * 3 // 5))
""",
    "memory in place of the interpreter's": """
def work(_):
    for line in open("/proc/self/maps"):
        place, mode, *_, name = (line.split() + [""])[:6]
        start, end = (int(word, 16) for word in place.split("-"))
        if mode == "rw-p" and end - start > MIB and "[" not in name:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(4096), 0)
            kept.append(bytearray(end - start))
    kept.append(bytearray(LIMIT // 8))
forks(31, work)
""",
    "fresh interpreters": """
code = f"import time; x = bytearray({LIMIT // 3}); x[::4096] = bytes(len(x[::4096])); time.sleep(60)"
forks(15, lambda _: os.execv(sys.executable or "/usr/bin/python3", ["python", "-I", "-S", "-c", code]))
""",
    "a chain of forks": """
while True:
    take(16 * MIB)
    if os.fork(): stay()
""",
    "children that take and end": """
while True:
    try:
        if os.fork() == 0:
            take(LIMIT // 4); os._exit(0)
    except OSError: time.sleep(0.001)
""",
    "memory that moves from process to process": """
def work(_):
    at = take(LIMIT // 6)
    while True:
        if os.fork(): os._exit(0)
        libc.memset(at, 3, LIMIT // 6)
forks(15, work)
""",
    "memory that processes inherit from ended ones": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def work(_):
    for _ in range(6):
        take(LIMIT // 8)
        if os.fork(): os._exit(0)
    stay()
forks(15, work)
""",
    "processes whose first thread has ended": """
def work(_):
    def hold():
        take(LIMIT // 3); stay()
    threading.Thread(target=hold).start()
    libc.syscall(60, 0)
forks(12, work)
""",
    "copies of a file's pages": """
import glob
files = sorted(glob.glob(os.path.dirname(os.__file__) + "/**/*", recursive=True), key=lambda p: -os.path.getsize(p))
def work(_):
    for path in files[:40]:
        if os.path.isfile(path): repeat_once(path)
def repeat_once(path):
    file = os.open(path, os.O_RDONLY)
    size = os.path.getsize(path)
    at = libc.mmap(None, size, 3, PRIVATE, file, 0)
    if at not in (None, 2**64 - 1): libc.memset(at, 1, size)
forks(31, work)
""",
    "files and memory": """
with open("/tmp/x", "wb") as file: repeat(lambda: file.write(bytes(MIB)))
forks(3, lambda _: take(LIMIT // 4))
""",
    "files that are deleted and mapped": """
def work(number):
    for name in (f"/dev/shm/{number}", f"/tmp/{number}"):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 8 * MIB); os.unlink(name)
        take(8 * MIB, SHARED, file)
    take(LIMIT // 12)
forks(31, work)
""",
    "names, links and attributes": """
def work(number):
    os.mkdir(f"/tmp/{number}")
    for i in range(100_000):
        path = f"/tmp/{number}/{i:0200}"
        os.symlink("x" * 4000, path)
        try: os.setxattr(path, "user.x", bytes(4000), follow_symlinks=False)
        except OSError: pass
forks(31, work)
""",
    "attributes of files": """
def work(number):
    for i in range(100_000):
        open(f"/tmp/{number}-{i}", "w").close()
        for j in range(16): os.setxattr(f"/tmp/{number}-{i}", f"user.{j}", bytes(60_000))
forks(31, work)
""",
    "datagrams": """
def work(_):
    def pair():
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for one in kept[-1]: fill(one, bytes(200_000)); fill(one)
    repeat(pair)
forks(30, work)
""",
    "sockets with large buffers": """
def work(_):
    def pair():
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        for one in kept[-1]:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            fill(one, bytes(100_000)); fill(one)
    repeat(pair)
forks(30, work)
""",
    "connections that nobody accepts": """
def work(number):
    for name in range(100):
        server = socket.socket(socket.AF_UNIX); server.bind(f"\\0{number}-{name}"); server.listen(4096)
        kept.append(server)
        def connect():
            client = socket.socket(socket.AF_UNIX); client.setblocking(False)
            client.connect(f"\\0{number}-{name}")
            fill(client); client.close()
        repeat(connect)
forks(8, work)
""",
    "sockets within sockets": """
def work(_):
    outer = socket.socketpair()
    outer[0].setblocking(False)
    def pair():
        one, two = socket.socketpair()
        fill(one); fill(two)
        socket.send_fds(outer[0], [b"x"], [one.fileno(), two.fileno()])
        one.close(); two.close()
    repeat(pair)
    kept.append(outer)
forks(31, work)
""",
    "large pipes": """
def work(_):
    def one():
        kept.append(os.pipe()); end = kept[-1][1]
        try: fcntl.fcntl(end, 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(end, False)
        repeat(lambda: os.write(end, bytes(65536)))
    repeat(one)
forks(31, work)
""",
    "pipes with huge pages": """
def work(_):
    def one():
        kept.append(os.pipe()); end = kept[-1][1]
        for _ in range(16):
            size = 4 * MIB
            at = libc.mmap(None, size, 3, PRIVATE | ANONYMOUS, -1, 0)
            start = (at + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 * MIB), 14)
            ctypes.memset(start, 1, 4096)
            vector = struct.pack("QQ", start, 1)
            libc.syscall(278, end, vector, 1, 2)
            libc.munmap(at, size)
    repeat(one)
forks(31, work)
""",
    "pages of files in pipes": """
def work(number):
    file = os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT)
    def one():
        kept.append(os.pipe()); os.set_blocking(kept[-1][1], False)
        os.ftruncate(file, 0); os.pwrite(file, bytes(65536), 0)
        for page in range(16): os.splice(file, kept[-1][1], 1, offset_src=4096 * page)
    repeat(one)
forks(31, work)
""",
    "pages of files in sockets": """
def work(number):
    file = os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT)
    read, write = os.pipe(); os.set_blocking(write, False)
    def pair():
        kept.append(socket.socketpair())
        one = kept[-1][0]; one.setblocking(False)
        def piece():
            os.ftruncate(file, 0); os.pwrite(file, bytes(65536), 0)
            for page in range(16): os.splice(file, write, 1, offset_src=4096 * page)
            os.splice(read, one.fileno(), 16)
        repeat(piece)
        def piece():
            os.ftruncate(file, 0); os.pwrite(file, bytes(4096), 0)
            os.sendfile(one.fileno(), file, 0, 1)
        repeat(piece)
    repeat(pair)
forks(31, work)
""",
    "netlink": """
def work(_):
    def one():
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); kept.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        request = struct.pack("=LHHLLB15x", 32, 18, 0x301, 1, 0, 0)
        sock.setblocking(False)
        for _ in range(3000): sock.send(request)
    repeat(one)
forks(31, work)
""",
    "filters of sockets": """
code = struct.pack("HBBI", 0x06, 0, 0, 1) * 4096
at = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", 4096, ctypes.addressof(at))
def work(_):
    def one():
        kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        kept[-1].setsockopt(socket.SOL_SOCKET, 26, program)
    repeat(one)
    for sock in socket.socketpair(): kept.append(sock); sock.setsockopt(socket.SOL_SOCKET, 26, program)
forks(31, work)
""",
    "many mappings": """
size = LIMIT // 8 * 7
at = libc.mmap(None, size, 0, PRIVATE | ANONYMOUS, -1, 0)
for page in range(0, size // 4096, 2):
    if libc.mprotect(ctypes.c_void_p(at + 4096 * page), ctypes.c_size_t(4096), 1): break
forks(31, lambda _: None)
""",
    "tables of pages": """
def work(_):
    size = LIMIT // 16 * 15
    at = libc.mmap(None, size, 1, PRIVATE | ANONYMOUS, -1, 0)
    total = 0
    for place in range(0, size, 4096): total += ctypes.c_char.from_address(at + place).value[0]
forks(31, work)
""",
    "stacks of threads": """
threading.stack_size(LIMIT // 16)
def deep():
    x = (ctypes.c_char * (LIMIT // 20))(); kept.append(x); libc.memset(ctypes.addressof(x), 1, len(x)); stay()
def work(_):
    for _ in range(10): threading.Thread(target=deep).start()
try: forks(3, work)
except RuntimeError: stay()
""",
    "locks of files": """
def work(number):
    for name in range(600):
        file = os.open(f"/tmp/{number}-{name % 150}", os.O_RDWR | os.O_CREAT)
        for place in range(0, 4000, 2):
            try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError: pass
        kept.append(file)
        if len(kept) > 150: kept.clear()
forks(31, work)
""",
    "waits for waits": """
def work(_):
    files = [fd for _ in range(60) for fd in os.pipe()]
    def one():
        poll = select.epoll(); kept.append(poll)
        for file in files: poll.register(file, select.EPOLLIN)
    repeat(one)
forks(31, work)
""",
    "events of folders": """
def work(number):
    os.mkdir(f"/tmp/{number}")
    for _ in range(120):
        file = libc.inotify_init()
        if file < 0 or libc.inotify_add_watch(file, f"/tmp/{number}".encode(), 0xfff) < 0: break
    for i in range(16_000):
        path = f"/tmp/{number}/{i:0250}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY)); os.unlink(path)
forks(8, work)
""",
    "rings of the kernel's": """
def work(_):
    while True:
        context = ctypes.c_ulong(0)
        if libc.syscall(206, 1000, ctypes.byref(context)): break
        print("ESCAPED", flush=True)
forks(31, work)
""",
    "signals that wait": """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
def work(_):
    info = ctypes.create_string_buffer(128)
    def one():
        ctypes.memmove(info, struct.pack("iii", 40, 0, -1), 12)
        if libc.syscall(129, os.getpid(), 40, info): raise OSError
    repeat(one)
    timer = ctypes.c_int(0)
    for _ in range(100_000):
        if libc.syscall(222, 1, None, ctypes.byref(timer)): break
forks(31, work)
""",
    "its standard input as a file": """
for number in os.listdir("/proc/self/fd"):
    for file in (int(number), None):
        try:
            if file is None: file = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
            if os.path.realpath(f"/proc/self/fd/{number}").startswith(("/dev", "/proc")): continue
            os.lseek(file, 0, 0)
            for _ in range(1024): os.write(file, bytes(MIB))
        except OSError: pass
        try:
            if os.fstat(file).st_size > MIB: print("ESCAPED", number, flush=True)
        except OSError: pass
forks(3, lambda _: take(LIMIT // 4))
""",
    "objects without a name": """
for number, arguments in {
    319: (b"x", 0), 447: (0,), 29: (0, 1 << 26, 0o1600), 64: (0, 250, 0o1600), 68: (0, 0o1600),
    240: (b"/x", 66, 0o600, None), 323: (0,), 425: (64, ctypes.create_string_buffer(120)), 450: (1 << 26,),
}.items():
    if libc.syscall(number, *arguments) >= 0: print("ESCAPED", number, flush=True)
""",
    "long arguments": """
def work(_):
    os.execv("/bin/sleep", ["sleep", "60", *("x" * 100_000 for _ in range(19))])
forks(31, work)
""",
}  # fmt: skip

ENDLESS = {
    "busy forks whose names are no text": """
def work(number):
    libc.prctl(15, (b"\\xff\\xfe", b"\\x0cVmPTE: x", b"\\rNSpid:", b") Z (\\xff")[number % 4], 0, 0, 0)
    while True: pass
libc.prctl(15, b"\\xff\\xfe", 0, 0, 0)
forks(31, work)
""",
    "busy forks": "forks(31, lambda _: exec('while True: pass'))",
    "busy forks in sessions of their own": """
def work(_):
    os.setsid()
    while True: pass
forks(31, work)
""",
    "busy forks that ask for priority": """
def work(_):
    for ask in (lambda: os.nice(-10), lambda: os.sched_setscheduler(0, 1, os.sched_param(50)),
                lambda: os.sched_setscheduler(0, 2, os.sched_param(99)), lambda: os.setpriority(0, 0, -20)):
        try: ask(); print("ESCAPED", flush=True)
        except OSError: pass
    while True: pass
forks(31, work)
""",
    "forks that fork": """
def work(_):
    while True:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
forks(20, work)
""",
    "parents that wait within fork": """
def work(_):
    libc.syscall(56, 0x4000 | 17, 0, 0, 0, 0)
    stay()
forks(15, work)
""",
    "forks that stop each other": """
def work(_):
    while True:
        for pid in range(2, 40):
            try: os.kill(pid, signal.SIGSTOP if pid % 2 else signal.SIGCONT)
            except OSError: pass
forks(31, work)
""",
    "many mappings that change": """
size = LIMIT // 8 * 7
at = libc.mmap(None, size, 0, PRIVATE | ANONYMOUS, -1, 0)
for page in range(0, size // 4096, 2):
    if libc.mprotect(ctypes.c_void_p(at + 4096 * page), ctypes.c_size_t(4096), 3): break
def work(_):
    while True:
        for mode in (1, 3): libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(size), mode)
forks(31, work)
""",
    "forks that look at each other's memory": """
def work(_):
    while True:
        for pid in range(1, 40):
            try: open(f"/proc/{pid}/smaps").read()
            except OSError: pass
forks(31, work)
""",
    "forks that write out the host's disks": """
def work(_):
    file = os.open("/usr/bin/env", os.O_RDONLY)
    while True: libc.sync(); libc.syncfs(file)
forks(31, work)
""",
    "sockets in circles": """
def work(_):
    while True:
        one, two = socket.socketpair()
        for _ in range(60):
            try:
                socket.send_fds(one, [b"x"], [two.fileno(), one.fileno()]); socket.send_fds(two, [b"x"], [one.fileno()])
            except OSError: break
        one.close(); two.close()
forks(31, work)
""",
    "children that nobody waits for": """
while True:
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: pass
""",
    "folders that are renamed": """
def work(number):
    os.makedirs(f"/tmp/{number}/" + "/".join("d" * 200)) if number < 20 else None
    while True:
        try: os.rename(f"/tmp/{number}", f"/tmp/x{number}"); os.rename(f"/tmp/x{number}", f"/tmp/{number}")
        except OSError: pass
forks(31, work)
""",
    "waits within waits": """
def work(_):
    pipes = [os.pipe() for _ in range(30)]
    level = [read for read, _ in pipes]
    for _ in range(4):
        polls = []
        for _ in range(20):
            poll = select.epoll(); polls.append(poll)
            for file in level:
                try: poll.register(file, select.EPOLLIN)
                except OSError: pass
        kept.extend(polls); level = [poll.fileno() for poll in polls]
    while True:
        for read, write in pipes: os.write(write, b"x"); os.read(read, 1)
forks(31, work)
""",
}  # fmt: skip

FAMILIES = """
allowed = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
for family in range(1, 64):
    for kind in (1, 2, 3, 5):
        for call in (lambda: socket.socket(family, kind), lambda: socket.socketpair(family, kind)):
            try: call()
            except OSError: continue
            if family not in allowed: print("ESCAPED", family, kind, flush=True)
"""
"""Asks for every family of sockets."""

MODERATE = {
    "memory that comes and goes": """
for _ in range(10): x = bytearray(LIMIT * 6 // 10); x[::4096] = bytes(len(x[::4096])); del x
""",
    "children beside much memory": """
import subprocess
x = bytearray(LIMIT * 7 // 10); x[::4096] = bytes(len(x[::4096]))
for _ in range(200): subprocess.run(["true"], check=True)
""",
    "a pool near the limit": """
import multiprocessing
def work(number):
    for _ in range(20): x = bytearray(LIMIT // 20); x[::4096] = bytes(len(x[::4096])); time.sleep(0.01)
    return number
with multiprocessing.Pool(6) as pool: assert pool.map(work, range(12)) == list(range(12))
""",
    "shared memory of a pool": """
import multiprocessing.shared_memory
one = multiprocessing.shared_memory.SharedMemory(create=True, size=16 * MIB)
array = multiprocessing.Array("d", 1000)
def work(number): one.buf[number * MIB] = number; array[number] = number
made = [multiprocessing.Process(target=work, args=(number,)) for number in range(8)]
for process in made: process.start()
for process in made: process.join()
assert [one.buf[number * MIB] for number in range(8)] == [array[number] for number in range(8)] == list(range(8))
one.close(); one.unlink()
""",
    "a data base, files that are copied, and events": """
import asyncio, shutil, sqlite3
base = sqlite3.connect("/tmp/x.db"); base.execute("create table x (y)")
base.executemany("insert into x values (?)", [(i,) for i in range(1000)]); base.commit()
assert base.execute("select sum(y) from x").fetchone() == (499500,)
shutil.copyfile("/tmp/x.db", "/tmp/y.db")
async def main():
    made = await asyncio.create_subprocess_exec("head", "-c", "100", "/dev/zero", stdout=-1)
    assert (await made.communicate())[0] == bytes(100)
asyncio.run(main())
pairs = [socket.socketpair() for _ in range(50)]
""",
}  # fmt: skip
"""Programs that keep to their limits, if only just, and that nothing may end."""
