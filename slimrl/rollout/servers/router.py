"""smg in front of the engines: one address, and every session on one engine.

Requests are spread by consistent hashing of the header X-SMG-Routing-Key, so that a session's turns hit the prefix
cache of its earlier turns. The control plane (`--enable-rl`) lists the engines with their health and weight version;
slimrl asks it whether all are served. It can also broadcast a call to all engines, but not as a weight update needs:
with a different body for each engine (the broadcast group's ranks differ), a deadline per call (it has one for all, set
at the start), and notice of an engine's failure before the next call. So resync calls each engine itself (control.py).
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from smg.rl import Worker

from slimrl.data.engine import EngineError
from slimrl.rollout.servers.ports import free_ports
from slimrl.rollout.servers.process import ServerError, ServerProcess

_NO_PROXY = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "")
"""Else the router would reach the engines, which are in the cluster, through a proxy of its environment."""


class Router:
    """A running router. The constructor starts it; `wait_ready` waits until it serves every engine."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        log: Path,
        *,
        timeout_s: float,
        request_timeout_s: float,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        """Start it.

        Args:
            engine_urls: of running engines.
            log: file for its output.
            timeout_s: deadline of its start and of each control call.
            request_timeout_s: the client's deadline of one generation; the router's is longer.
            host: address to listen on.
            port: None for a free one.
        """
        free, metrics_port = free_ports(2, host)
        self.port = port or free
        self.url = f"http://{host}:{self.port}"
        self._num_engines = len(engine_urls)
        self._timeout_s = timeout_s
        options = {
            "host": host,
            "port": self.port,
            "policy": "consistent_hashing",
            "prometheus-host": host,
            "prometheus-port": metrics_port,
            "request-timeout-secs": int(request_timeout_s) + 60,
            "rl-control-timeout-secs": max(1, int(timeout_s)),
            # slimrl limits the number of concurrent requests.
            "max-concurrent-requests": 0,
            "log-level": "warn",
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.process = ServerProcess(
            "router",
            [sys.executable, "-m", "slimrl.rollout.servers.launch_router", str(os.getpid()), *flags, "--enable-rl",
             "--worker-urls", *engine_urls],
            _NO_PROXY,
            log,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until every engine is served; raises ServerError with the cause from the log."""
        deadline = time.monotonic() + self._timeout_s
        self.process.wait_ready(f"{self.url}/readiness", self._timeout_s)
        while (found := sum(worker.health == "ready" for worker in self.workers())) < self._num_engines:
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(f"the router serves {found} of {self._num_engines} engines")
            time.sleep(0.1)

    def workers(self) -> list[Worker]:
        """The router's view of the engines: url, health, weight_version."""
        # Not smg's own client, which would use a proxy of the environment.
        try:
            answer = httpx.get(f"{self.url}/v1/rl/workers", timeout=self._timeout_s, trust_env=False)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"router: {error}") from error
        return [Worker.from_json(worker) for worker in answer.json()["workers"]]

    def check(self) -> None:
        """Raises ServerError with the cause from the log if the router has ended."""
        self.process.check()

    def stop(self) -> None:
        self.process.stop()
