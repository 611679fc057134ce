"""Kinds of faults. Each function makes one happen to a run, and says what it was and what must follow."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_calculator import FAILS, SLOW, calls_at_fault
from chaos_legs import SAVED_STEPS, Leg
from chaos_run import (
    ENGINE_ACTOR,
    EPISODE_WORKER,
    LEFT_S,
    START_S,
    TRAINER,
    WORKER,
    Broken,
    ChaosRun,
    Hit,
    execute,
    tail,
)
from cli_runs import ENGINE, CliRun

PAUSE_S = 10.0
"""For which a tool, a disk, a network or the trainer is at fault."""
LOSS_S = 25.0
"""For which packets are dropped: longer than `rollout.health_timeout_s`"""
AWAY_S = 30.0
"""For which the reward service is."""
AHEAD_S, BEHIND_S = 3600, -30
"""Jumps of the wall clock. After one of an hour back, Ray has not given a run's slots free within a minute."""
SCRAPERS = 100
CHECK_S = 120.0
"""Deadline of a step, or of a use of what is at fault, while the fault lasts"""
SINCE_CHECKPOINT = SAVED_STEPS + 1
"""Most steps that are done again after the newest checkpoint; while it is written, another one goes on."""
SANDBOX = "inside.zygote import main"
"""In the command lines of a sandbox's processes"""


def engine_signalled(number: signal.Signals) -> Callable[[ChaosRun], Hit]:
    def act(run: ChaosRun) -> Hit:
        back = rejoins(run)
        server = run.rng.choice(servers(run))
        name = log_name(server)
        run.note_hit()
        send_tree(server, number)
        return Hit(what=name, back=back)

    return act


def servers(run: ChaosRun) -> list[psutil.Process]:
    """The main process of each engine's server."""
    found = []
    for process in run.members(ENGINE):
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == process.pid:
                found.append(process)
    return found


def log_name(process: psutil.Process) -> str:
    """Name of the log of a process that lives."""
    return Path(f"/proc/{process.pid}/fd/2").resolve().stem


def send_tree(process: psutil.Process, number: signal.Signals) -> None:
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            member.send_signal(number)


def rejoins(run: ChaosRun) -> Callable[[], bool]:
    """Whether an engine more than now has started."""
    return happens(run, ", server on ")


def happens(run: ChaosRun, text: str) -> Callable[[], bool]:
    """Whether the driver's log has this text once more than now."""
    count = run.log().count(text)
    return lambda: run.log().count(text) > count


def worker_killed(run: ChaosRun) -> Hit:
    back = rejoins(run)
    worker = run.pick(WORKER)
    run.note_hit()
    worker.kill()
    return Hit(what=f"process {worker.pid}", back=back)


def actor_killed(run: ChaosRun) -> Hit:
    back = rejoins(run)
    actor = run.pick(ENGINE_ACTOR)
    name = log_name(actor)
    run.note_hit()
    actor.kill()
    if run.leg.mode == "colocated":
        return Hit(what=name, end="engine [01]: its process died", most_lost=SINCE_CHECKPOINT)
    return Hit(what=name, back=back)


def engines_node_lost(run: ChaosRun) -> Hit:
    return lose_node(run, ENGINE_ACTOR, rejoins(run), most_lost=0)


def trainers_node_lost(run: ChaosRun) -> Hit:
    return lose_node(run, TRAINER, restarts(run), most_lost=SINCE_CHECKPOINT)


def lose_node(run: ChaosRun, text: str, back: Callable[[], bool], most_lost: int) -> Hit:
    """The node with a process of this text dies, and another joins."""
    lost = run.rng.choice(run.nodes_with(text))
    run.note_hit()
    run.nodes.kill_raylet(lost)
    run.nodes.join(run.leg.trainer_slots if text == TRAINER else 1)
    if run.leg.mode == "colocated":
        return Hit(what=f"node {lost}", end="its node .* was lost", most_lost=most_lost)
    return Hit(what=f"node {lost}", back=back, most_lost=most_lost)


def restarts(run: ChaosRun) -> Callable[[], bool]:
    return happens(run, "the trainer has started again")


def trainer_signalled(number: signal.Signals) -> Callable[[ChaosRun], Hit]:
    def act(run: ChaosRun) -> Hit:
        back = restarts(run)
        rank = run.pick(TRAINER)
        name = log_name(rank)
        run.note_hit()
        rank.send_signal(number)
        return Hit(what=name, back=back, most_lost=SINCE_CHECKPOINT)

    return act


def trainer_pauses(run: ChaosRun) -> Hit:
    """Groups end and nobody takes them, until no other may begin."""
    ranks = run.members(TRAINER)
    run.note_hit()
    for rank in ranks:
        rank.suspend()
    time.sleep(PAUSE_S)
    for rank in ranks:
        rank.resume()
    return Hit(what=f"{PAUSE_S:g} s")


def driver_signalled(number: signal.Signals) -> Callable[[ChaosRun], Hit]:
    ends = {
        signal.SIGKILL: ("", -signal.SIGKILL, SINCE_CHECKPOINT),
        signal.SIGTERM: ("ended by SIGTERM", 1, SINCE_CHECKPOINT),
        signal.SIGUSR1: ("preempted by SIGUSR1", 75, 0),
    }

    def act(run: ChaosRun) -> Hit:
        end, code, most_lost = ends[number]
        run.process.send_signal(number)
        return Hit(what="", end=end, code=code, most_lost=most_lost)

    return act


def interrupted(run: ChaosRun) -> Hit:
    assert run.driver is not None
    run.driver.interrupt_as_terminal()
    return Hit(what="", end="ended by SIGINT", most_lost=SINCE_CHECKPOINT)


def head_lost(run: ChaosRun) -> Hit:
    """The process that knows the cluster dies; all nodes go with it, and others take their place."""
    (gcs,) = run.nodes.running("gcs_server")
    run.note_hit()
    gcs.kill()
    return Hit(what="", end="Ray's head", repair=run.renew_nodes, most_lost=SINCE_CHECKPOINT)


def clock_jumps(seconds: int) -> Callable[[ChaosRun], Hit]:
    def act(run: ChaosRun) -> Hit:
        run.offset_s += seconds
        run.clock.jump(run.offset_s)
        return Hit(what=f"to {run.offset_s:+d} s")

    return act


def packets_dropped(run: ChaosRun) -> Hit:
    """What an engine and others send each other is lost for a while; a deterministic run may not lose the engine."""
    server = run.rng.choice(servers(run))
    ports = set()
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            ports |= {one.laddr.port for one in process.net_connections("tcp") if one.laddr}
    seconds = 2.0 if run.leg.exact else LOSS_S
    name, back = log_name(server), happens(run, " 2 of 2 engines")
    run.note_hit()
    with dropping(ports) as num_dropped:
        run.wait(lambda: num_dropped() > 0, CHECK_S, f"packet of {name}")
        time.sleep(seconds)
        count = num_dropped()
    return Hit(what=f"{name}, {count} packets of {len(ports)} ports, {seconds:g} s", back=back)


@contextmanager
def dropping(ports: set[int]) -> Iterator[Callable[[], int]]:
    """Drop the packets from and to these ports, in the network namespace of this process; yields how many so far."""
    numbers = ", ".join(map(str, sorted(ports)))
    nft("add table inet chaos")
    try:
        nft("add chain inet chaos input { type filter hook input priority 0; }")
        nft(f"add rule inet chaos input tcp dport {{ {numbers} }} counter drop")
        nft(f"add rule inet chaos input tcp sport {{ {numbers} }} counter drop")
        yield num_dropped
    finally:
        nft("delete table inet chaos")


def nft(command: str) -> None:
    execute("nft", command)


def num_dropped() -> int:
    rules = subprocess.run(["nft", "list table inet chaos"], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"counter packets (\d+)", rules)))


def tool_at_fault(how: str) -> Callable[[ChaosRun], Hit]:
    def act(run: ChaosRun) -> Hit:
        file, before = run.tools / how, calls_at_fault(run.tools, how)
        file.touch()
        try:
            time.sleep(PAUSE_S)
            run.wait(lambda: calls_at_fault(run.tools, how) > before, CHECK_S, "call of a tool")
        finally:
            file.unlink()
        return Hit(what=f"{calls_at_fault(run.tools, how) - before} calls, {PAUSE_S:g} s")

    return act


def process_killed(text: str) -> Callable[[ChaosRun], Hit]:
    """Another starts when one is needed again."""

    def act(run: ChaosRun) -> Hit:
        run.wait(lambda: bool(outermost(run, text)), CHECK_S, text)
        before = outermost(run, text)
        process = run.rng.choice(before)
        run.note_hit()
        process.kill()

        def back() -> bool:
            return sum(one != process for one in outermost(run, text)) >= len(before)

        return Hit(what=f"process {process.pid}, one of {len(before)}", back=back)

    return act


def outermost(run: ChaosRun, text: str) -> list[psutil.Process]:
    """Processes with this text in their command lines whose parents have it not."""
    found = run.members(text)
    pids = {process.pid for process in found}
    roots = []
    for process in found:
        with suppress(psutil.NoSuchProcess):
            if process.ppid() not in pids:
                roots.append(process)
    return roots


def reward_away(run: ChaosRun) -> Hit:
    service, before = run.service, run.service.refused
    service.reward_away.set()
    try:
        time.sleep(AWAY_S)
        run.wait(lambda: service.refused > before, CHECK_S, "request for rewards")
    finally:
        service.reward_away.clear()
    return Hit(what=f"{service.refused - before} requests, {AWAY_S:g} s")


def spans_hang(run: ChaosRun) -> Hit:
    """The collector of OpenTelemetry answers nobody."""
    service, before = run.service, run.service.hung
    service.spans_hang.set()
    try:
        run.await_step(CHECK_S)
        run.wait(lambda: service.hung > before, CHECK_S, "request of the collector")
    finally:
        service.spans_hang.clear()
    return Hit(what=f"{service.hung - before} requests, until a step was done")


def scrapers_hang(run: ChaosRun) -> Hit:
    """Connections to the endpoint for Prometheus that ask for half a page."""
    with ExitStack() as open_ones:
        for _ in range(SCRAPERS):
            scraper = open_ones.enter_context(socket.create_connection(("127.0.0.1", run.prometheus), timeout=5))
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n")
        run.await_step(CHECK_S)
    return Hit(what=f"{SCRAPERS} connections")


def disk_full(run: ChaosRun) -> Hit:
    """Nothing more can be written to the run's disk; it is freed when the run has ended."""
    with run.filler.open("wb", buffering=0) as file:
        size = 2**26
        while size >= 512:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return Hit(what="", end="no space left on the disk", repair=run.free_disk, most_lost=SINCE_CHECKPOINT)


def disk_hangs(run: ChaosRun) -> Hit:
    """Whoever writes to the run's disk waits."""
    execute("fsfreeze", "-f", str(run.disk))
    try:
        time.sleep(PAUSE_S)
    finally:
        execute("fsfreeze", "-u", str(run.disk))
    return Hit(what=f"{PAUSE_S:g} s")


def data_replaced(run: ChaosRun) -> Hit:
    """Another file takes the place of the prompts while the run goes on."""
    kept = run.data.rename(run.data.with_suffix(".kept"))
    run.data.write_text('{"prompt": "another file", "label": "0"}\n')
    try:
        run.await_step(CHECK_S)
    finally:
        kept.rename(run.data)
    return Hit(what="until a step was done")


def checkpoint_flipped(run: ChaosRun) -> Hit:
    """A byte of the newest checkpoint changes after the driver was killed: it is refused, and the one before taken."""
    run.wait(lambda: len(run.checkpoints()) >= 2, CHECK_S, "second checkpoint")
    run.note_hit()
    run.process.kill()

    def repair() -> None:
        file = run.rng.choice(sorted(run.newest_checkpoint().glob("trainer/*.distcp")))
        content = bytearray(file.read_bytes())
        content[run.rng.randrange(len(content))] ^= 1
        file.write_bytes(content)
        refused = CliRun(run.command())
        try:
            code = refused.wait(START_S)
            moves = re.search(r"^\s*mv (\S+) (\S+)$", refused.stderr, re.MULTILINE)
            if code != 1 or "is damaged" not in refused.stderr or moves is None or refused.left(LEFT_S):
                raise Broken(f"a damaged checkpoint, and {code}: {tail(refused.stdout + refused.stderr)}")
            Path(moves[1]).rename(moves[2])
        finally:
            refused.close()

    lost = SINCE_CHECKPOINT + SAVED_STEPS
    return Hit(what="", end="", code=-signal.SIGKILL, repair=repair, most_lost=lost)


def wandb_away(run: ChaosRun) -> Hit:
    """The run is continued with a server of wandb that nobody reaches."""
    back = happens(run, "wandb does not go online")
    run.process.send_signal(signal.SIGUSR1)
    return Hit(what="", back=back, end="preempted by SIGUSR1", code=75, settings=("tracking.wandb=online",))


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and the runs to which it happens."""

    act: Callable[[ChaosRun], Hit]
    suits: Callable[[Leg], bool] = lambda leg: True


def anywhere(leg: Leg) -> bool:
    """All but the synchronous runs that are for faults of engines alone."""
    return leg.exact or leg.mode == "async"


def replaces_engines(leg: Leg) -> bool:
    return not leg.exact


def is_async(leg: Leg) -> bool:
    return leg.mode == "async"


def adds_engines(leg: Leg) -> bool:
    return not leg.exact and leg.mode != "colocated"


KINDS: dict[str, Kind] = {
    "engine killed": Kind(engine_signalled(signal.SIGKILL), replaces_engines),
    "engine stopped": Kind(engine_signalled(signal.SIGSTOP), replaces_engines),
    "engine's worker killed": Kind(worker_killed, replaces_engines),
    "engine's actor killed": Kind(actor_killed, replaces_engines),
    "engines' node lost": Kind(engines_node_lost, adds_engines),
    "engine's packets dropped": Kind(packets_dropped),
    "trainer's rank killed": Kind(trainer_signalled(signal.SIGKILL), anywhere),
    "trainer's rank stopped": Kind(trainer_signalled(signal.SIGSTOP), anywhere),
    "trainers' node lost": Kind(trainers_node_lost, anywhere),
    "trainer pauses": Kind(trainer_pauses, anywhere),
    "driver killed": Kind(driver_signalled(signal.SIGKILL), anywhere),
    "driver ended by SIGTERM": Kind(driver_signalled(signal.SIGTERM), anywhere),
    "driver ended by SIGINT": Kind(interrupted, anywhere),
    "preemption": Kind(driver_signalled(signal.SIGUSR1), anywhere),
    "Ray's head lost": Kind(head_lost, anywhere),
    "clock jumps ahead": Kind(clock_jumps(AHEAD_S), anywhere),
    "clock jumps back": Kind(clock_jumps(BEHIND_S), anywhere),
    "slow tools": Kind(tool_at_fault(SLOW), is_async),
    "failing tools": Kind(tool_at_fault(FAILS), is_async),
    "sandbox killed": Kind(process_killed(SANDBOX), is_async),
    "episode worker killed": Kind(process_killed(EPISODE_WORKER), is_async),
    "reward service away": Kind(reward_away, anywhere),
    "full disk": Kind(disk_full, anywhere),
    "disk that hangs": Kind(disk_hangs, anywhere),
    "data file replaced": Kind(data_replaced, anywhere),
    "checkpoint damaged": Kind(checkpoint_flipped, anywhere),
    "wandb away": Kind(wandb_away, anywhere),
    "collector of spans hangs": Kind(spans_hang, anywhere),
    "scrapers of metrics hang": Kind(scrapers_hang, anywhere),
}
