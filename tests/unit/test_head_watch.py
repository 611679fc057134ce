"""The head of a cluster is lost when nobody has answered at its port for long enough, and not before."""

import socket
import time

from slimrl.runtime.cluster.head_watch import watching_head


def listen(port: int = 0) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.0)
    return listener


def test_a_head_is_lost_once_after_its_deadline():
    head, said = listen(), list[str]()
    address = f"127.0.0.1:{head.getsockname()[1]}"
    with watching_head(address, said.append, lost_s=0.5, poll_s=0.05):
        time.sleep(1.0)
        assert said == []
        closed = time.monotonic()
        head.close()
        while not said and time.monotonic() < closed + 20:
            time.sleep(0.01)
        time.sleep(1.0)
    (message,) = said
    assert message.startswith(f"Ray's head at {address} is lost: nobody has answered there for 0.5 s.")


def test_a_head_that_comes_back_in_time_and_one_after_the_run_are_not_lost():
    head, said = listen(), list[str]()
    port = head.getsockname()[1]
    with watching_head(f"127.0.0.1:{port}", said.append, lost_s=3.0, poll_s=0.2):
        time.sleep(3.5)
        head.close()
        time.sleep(0.8)
        head = listen(port)
        time.sleep(3.5)
    head.close()
    time.sleep(3.5)
    assert said == []
