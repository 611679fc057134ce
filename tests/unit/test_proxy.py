"""Engines are asked directly, whatever proxy the environment names."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slimrl.engines.client import SglangEngine
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.ports import free_ports
from slimrl.engines.servers.process import ServerProcess
from slimrl.engines.servers.server import EngineServer


class Engine(BaseHTTPRequestHandler):
    """Agrees to everything."""

    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format, *arguments) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of an engine, in an environment whose proxy nobody answers for."""
    (nobody,) = free_ports(1)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobody}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Engine, "asked", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engine_gets_ready(url: str, tmp_path: Path):
    process = object.__new__(ServerProcess)
    process.name, process.log = "engine 0", tmp_path / "log"
    process.check = lambda: None
    engine = object.__new__(EngineServer)
    engine.index, engine.url, engine._timeout_s, engine.process, engine._part = 0, url, 5.0, process, None
    engine._key = EngineKey("k")
    engine.wait_ready()
    assert Engine.asked == ["/health_generate", "/freeze_gc"]


def test_an_engine_is_controlled(url: str):
    control = SglangControl("engine 0", url, timeout_s=5.0, key=EngineKey("k"))
    control.resume()
    control.close()
    assert Engine.asked == ["/continue_generation"]


async def test_an_engine_is_asked_for_tokens(url: str):
    engine = SglangEngine(url)
    async with engine._session().post(f"{url}/generate") as response:
        assert response.status == 200
    await engine.aclose()
