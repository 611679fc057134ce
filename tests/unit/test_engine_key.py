"""The key of a run's engines: what shows it, how it reaches a process, and what passes without it."""

import asyncio
import logging
import os
import pickle
import subprocess
import sys

import pytest

from slimrl.engines.engine_key import EngineKey, new_key
from slimrl.engines.plugin.key_check import KeyCheck


def test_every_run_has_another_key_that_nobody_guesses():
    keys = {new_key().value for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 43  # 256 bits, 6 a character


def test_its_representation_does_not_show_it(caplog):
    key = new_key()
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%s %r %s", key, [key], {"key": key})
    assert key.value not in caplog.text
    assert key.value not in f"{key}"
    assert pickle.loads(pickle.dumps(key)) == key


def test_a_process_gets_it_through_a_pipe_and_neither_by_arguments_nor_by_environment():
    key = new_key()
    script = (
        "import sys; from slimrl.engines.engine_key import EngineKey; print(EngineKey.receive(int(sys.argv[1])).value);"
        "print(open('/proc/self/cmdline').read() + open('/proc/self/environ').read())"
    )
    with key.handed_over() as descriptor:
        command = [sys.executable, "-c", script, str(descriptor)]
        output = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, timeout=60, check=True)
    first, *others = output.stdout.splitlines()
    assert first == key.value
    assert key.value not in "".join(others)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


KEY = EngineKey("right")


def answered(scope: dict, expected: str = "right") -> str | int:
    """What becomes of a request: "passed" to SGLang, or the status of its refusal."""
    sent = []

    async def server(scope, receive, send):
        sent.append({"status": "passed"})

    async def send(message):
        sent.append(message)

    asyncio.run(KeyCheck(server, key=expected)(scope, None, send))
    return sent[0].get("status") or sent[0]["code"]


def request(path: str = "/generate", *, method: str = "POST", headers: dict[str, str] | None = None) -> dict:
    """As an ASGI server gives it to its application."""
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return {"type": "http", "method": method, "path": path, "headers": raw}


@pytest.mark.parametrize(
    ("scope", "outcome"),
    [
        (request(headers=KEY.headers), "passed"),
        (request("/health_generate", method="GET", headers=KEY.headers), "passed"),
        ({"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", b"Bearer right")]}, "passed"),
        ({"type": "lifespan"}, "passed"),
        (request("/health", method="GET"), "passed"),
        (request("/metrics", method="GET"), "passed"),
        (request(), 401),
        (request(headers={"authorization": "Bearer wrong"}), 401),
        (request(headers={"authorization": "right"}), 401),
        (request(headers={"authorization": "Bearer "}), 401),
        (request(headers={"authorization": "Bearer r\u00e9"}), 401),
        (request(headers={"x-api-key": "right"}), 401),
        (request("/flush_cache", method="GET"), 401),
        (request("/generate", method="OPTIONS"), 401),
        (request("/health", method="POST"), 401),
        (request("/health_generate", method="GET"), 401),
        (request("/healthy/../generate"), 401),
        (request("/ready", method="GET"), 401),
        (request("/metrics/../flush_cache", method="GET"), 401),
        (request("/flush_cache", method="GET", headers={"host": "x/health?"}), 401),
        (request("/flush_cache", method="GET", headers={"host": "x/metrics#"}), 401),
        ({"type": "websocket", "path": "/v1/realtime", "headers": []}, 1008),
        ({"type": "websocket", "path": "/health", "headers": []}, 1008),
    ],
)
def test_what_passes(scope, outcome):
    assert answered(scope) == outcome


def test_of_two_keys_in_a_request_none_counts():
    scope = request(headers=KEY.headers)
    scope["headers"] = [(b"authorization", b"Bearer wrong"), *scope["headers"]]
    assert answered(scope) == 401
