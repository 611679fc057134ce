"""A head of a cluster is lost when nobody answers at its port: that is said at once, and later ends the run."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from slimrl.runtime.cluster import head_watch
from slimrl.runtime.cluster.head_watch import watching_head


class Head:
    """A server that keeps its connections, as the head does, and dies as one."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self._listener.accept()[0])
            except OSError:
                return

    def hang_up(self) -> None:
        for connection in self.taken:
            connection.close()

    def die(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()


def wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lost_head_is_said_once_and_ends_the_run_after_its_deadline():
    head, said, ends = Head(), list[str](), list[float]()
    address = f"127.0.0.1:{head.port}"
    with watching_head(address, said.append, lambda: ends.append(time.monotonic()), lost_s=2.0, poll_s=0.05):
        wait(lambda: len(head.taken) == 1)
        # One that hangs up is not lost.
        head.hang_up()
        wait(lambda: len(head.taken) == 2)
        time.sleep(2.5)
        assert said == []
        head.die()
        wait(lambda: said != [])
        noticed = time.monotonic()
        wait(lambda: ends != [])
        time.sleep(0.5)
    assert ends[0] - noticed > 0.5
    assert len(ends) == 1
    (message,) = said
    assert message.startswith(f"Ray's head at {address} is lost: nobody answers there.")


def test_a_head_that_comes_back_in_time_and_one_after_the_run_end_nothing():
    head, said, ends = Head(), list[str](), list[None]()
    with watching_head(f"127.0.0.1:{head.port}", said.append, lambda: ends.append(None), lost_s=5.0, poll_s=0.05):
        wait(lambda: len(head.taken) == 1)
        head.die()
        wait(lambda: len(said) == 1)
        head = Head(head.port)
        wait(lambda: len(head.taken) == 1)
        time.sleep(5.5)
    head.die()
    time.sleep(0.5)
    assert (len(said), ends) == (1, [])


def test_one_connection_that_is_too_slow_is_no_lost_head(monkeypatch: pytest.MonkeyPatch):
    head, said, slow = Head(), list[str](), list[None]()
    connect = head_watch._connect

    def connect_slowly(address: str) -> socket.socket | None:
        if head.taken and not slow:
            slow.append(None)
            return None
        return connect(address)

    monkeypatch.setattr(head_watch, "_connect", connect_slowly)
    with watching_head(f"127.0.0.1:{head.port}", said.append, lambda: None, lost_s=5.0, poll_s=0.05):
        wait(lambda: len(head.taken) == 1)
        head.hang_up()
        wait(lambda: len(head.taken) == 2)
    assert (slow, said) == ([None], [])
    head.die()


def test_a_connection_to_itself_is_none_to_a_head(monkeypatch: pytest.MonkeyPatch):
    create, made = socket.create_connection, list[socket.socket]()

    def create_from_the_same_port(address: tuple[str, int], timeout: float) -> socket.socket:
        made.append(create(address, timeout, source_address=address))
        return made[-1]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(head_watch.socket, "create_connection", create_from_the_same_port)
    assert head_watch._connect(f"127.0.0.1:{port}") is None
    assert [connection.fileno() for connection in made] == [-1]


def test_a_head_without_power_answers_no_probe_and_its_connection_ends():
    head = Head()
    connection = head_watch._connect(f"127.0.0.1:{head.port}")
    assert connection is not None
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle_s, interval_s, count = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    # Well before Ray's own 60 s.
    assert idle_s + interval_s * count <= 20
    connection.close()
    head.die()
