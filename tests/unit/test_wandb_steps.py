"""What wandb is told of a run, and of one that is resumed, by a stand-in that counts steps as wandb's server does."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimrl.config.schema.run import TrackingConfig, WandbMode
from slimrl.observability.run_folder import open_run_folder
from slimrl.observability.trackers import Trackers


class NotReached(Exception):
    """As wandb.Error"""


class Server:
    """wandb's rows by run id. What is logged below the last step is dropped; without a step each row is a new one."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.axes: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.ended: list[int] = []
        self._steps: dict[str, int] = {}

    def init(self, *, id: str, **settings: Any) -> SimpleNamespace:
        self.asked.append(settings)
        rows = self.rows.setdefault(id, [])

        def log(data: dict[str, float], step: int | None = None) -> None:
            last = self._steps.get(id, -1)
            if step is not None and step <= last:
                return
            self._steps[id] = last + 1 if step is None else step
            rows.append(data)

        def define_metric(name: str, step_metric: str) -> None:
            self.axes[name] = step_metric

        return SimpleNamespace(
            log=log, define_metric=define_metric, finish=lambda exit_code: self.ended.append(exit_code)
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    served = Server()
    stand_in = SimpleNamespace(Settings=dict, init=served.init, Error=NotReached, teardown=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    return served


def test_after_a_resume_wandb_gets_every_step_again_that_the_run_makes_again(tmp_path: Path, server: Server):
    run, online = open_run_folder(tmp_path, "demo", ""), TrackingConfig(wandb=WandbMode.online)
    with Trackers(run, online, {}, keep_through_step=None) as trackers:
        for step in range(5):
            trackers.log(step, {"reward/mean": 0.1 * step, "policy/loss": float("nan")})
    # Killed after step 4, with a checkpoint of step 2.
    with Trackers(run, online, {}, keep_through_step=2) as trackers:
        for step in (3, 4, 5):
            trackers.log(step, {"reward/mean": 1.0 + step})
    (rows,) = server.rows.values()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 3, 4, 5]
    assert server.axes == {"*": "step"}
    latest = {row["step"]: row["reward/mean"] for row in rows}
    file = {line["step"]: line["reward/mean"] for line in map(json.loads, run.metrics.read_text().splitlines())}
    assert latest == file
    assert all("policy/loss" not in row for row in rows)


def test_wandb_is_told_how_a_run_ended_once(tmp_path: Path, server: Server):
    run, tracking = open_run_folder(tmp_path, "demo", ""), TrackingConfig(wandb=WandbMode.offline, wandb_project="p")
    with Trackers(run, tracking, {"seed": 1}) as trackers:
        trackers.log(1, {"reward/mean": 0.5})
        trackers.close()
    with pytest.raises(ZeroDivisionError), Trackers(run, tracking, {}, keep_through_step=1) as trackers:
        raise ZeroDivisionError
    assert server.ended == [0, 1]
    with pytest.raises(ValueError, match="closed"):
        trackers.log(2, {"reward/mean": 0.5})
    first, again = server.asked
    settings = first.pop("settings")
    assert first == {
        "project": "p", "name": "demo", "resume": None, "dir": str(run.path), "mode": "offline", "config": {"seed": 1},
    }  # fmt: skip
    assert settings["silent"]
    assert settings["console"] == "off"
    private = ("disable_git", "disable_code", "disable_job_creation", "x_disable_stats", "x_disable_machine_info")
    assert all(settings[name] is True for name in private)
    assert again["config"] == {}
    assert list(server.rows) == [(run.wandb / "run_id").read_text()]


def test_a_run_that_goes_on_online_is_taken_up_there(tmp_path: Path, server: Server, monkeypatch):
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.delenv(f"WANDB_{name}_DIR", raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", "/mine")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    run = open_run_folder(tmp_path, "demo", "")
    Trackers(run, TrackingConfig(wandb=WandbMode.online), {}).close(failed=True)
    assert (server.asked[0]["resume"], server.ended) == ("allow", [1])
    assert (os.environ["WANDB_CACHE_DIR"], os.environ["WANDB_DATA_DIR"]) == (str(run.wandb / "cache"), "/mine")
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


@pytest.mark.parametrize(("given", "told"), [(None, False), ("false", True)])
def test_wandb_advertises_nothing_unless_the_user_asks_for_weave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str | None, told: bool
):
    import wandb
    from wandb.errors import term
    from wandb.integration.weave.weave import init_weave_if_imported

    monkeypatch.setenv("WANDB_DISABLE_WEAVE", given or "")
    if given is None:
        monkeypatch.delenv("WANDB_DISABLE_WEAVE")
    monkeypatch.setattr(term, "_printed_messages", set())
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace())
    server = Server()

    def init(**settings: Any) -> SimpleNamespace:
        init_weave_if_imported(None, settings["project"])  # as wandb.init ends
        return server.init(**settings)

    monkeypatch.setattr(wandb, "init", init)
    Trackers(open_run_folder(tmp_path, "demo", ""), TrackingConfig(wandb=WandbMode.offline), {}).close()
    assert len(server.asked) == 1
    assert ("weave" in capsys.readouterr().err.lower()) is told


def test_without_wandb_the_file_is_all(tmp_path: Path, server: Server):
    run = open_run_folder(tmp_path, "demo", "")
    with Trackers(run, TrackingConfig(wandb=WandbMode.disabled), {}) as trackers:
        trackers.log(1, {"reward/mean": 0.5})
    assert server.asked == []
    assert json.loads(run.metrics.read_text()) == {"step": 1, "reward/mean": 0.5}


def test_a_run_that_wandb_does_not_take_goes_on_offline_and_says_so(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    def init(mode: str, **settings: Any) -> SimpleNamespace:
        if mode == "online":
            raise NotReached("Run initialization has timed out after 60.0 sec.\nmore")
        return server.init(mode=mode, **settings)

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    said: list[str] = []
    run, online = open_run_folder(tmp_path, "demo", ""), TrackingConfig(wandb=WandbMode.online)
    with Trackers(run, online, {}, say=said.append) as trackers:
        trackers.log(1, {"reward/mean": 0.5})
    assert said == [
        "wandb goes on offline: Run initialization has timed out after 60.0 sec. "
        f"Send it later: wandb sync {run.wandb}/offline-run-*"
    ]
    assert [(asked["mode"], asked["resume"]) for asked in server.asked] == [("offline", None)]
    assert list(server.rows.values()) == [[{"step": 1, "reward/mean": 0.5}]]


@pytest.mark.parametrize(
    ("variables", "login", "found"),
    [
        ({}, "", False),
        ({"WANDB_API_KEY": "k" * 40}, "", True),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/token"}, "", True),
        ({}, "machine api.wandb.ai\n  login user\n  password kkkk\n", True),
        ({}, "machine github.com\n  login user\n  password kkkk\n", False),
        ({}, "machine api.wandb.ai\n  login user\n  password kkkk\n  nonsense\n", False),
        ({"WANDB_BASE_URL": "https://wandb.site:8080"}, "machine api.wandb.ai login u password k\n", False),
        ({"WANDB_BASE_URL": "https://wandb.site:8080"}, "machine wandb.site:8080 login u password k\n", True),
    ],
)
def test_without_a_key_wandb_is_not_asked_to_go_online(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], login: str, found: bool
):
    from wandb.sdk.lib.wbauth.host_url import HostUrl
    from wandb.sdk.lib.wbauth.wbnetrc import read_netrc_auth_with_source

    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(login.replace("kkkk", "k" * 40).replace("password k\n", f"password {'k' * 40}\n"))
    if variables.keys() <= {"WANDB_BASE_URL"}:
        host = HostUrl(variables.get("WANDB_BASE_URL", "https://api.wandb.ai"))
        assert (read_netrc_auth_with_source(host=host) is not None) is found
    said: list[str] = []
    run, online = open_run_folder(tmp_path, "demo", ""), TrackingConfig(wandb=WandbMode.online)
    Trackers(run, online, {}, say=said.append).close()
    assert server.asked[0]["mode"] == ("online" if found else "offline")
    assert [line.split(":")[0] for line in said] == ([] if found else ["wandb goes on offline"])
