"""The page that follows runs: what it is served agrees with the page as a file, and nobody else gets it."""

import html
import http.client
import json
import shutil
import socket
import threading
from contextlib import contextmanager

import pytest
from page_run import STEPS, make_run, metrics
from typer.testing import CliRunner

from slimrl.base.folder_lock import folder_lock
from slimrl.cli import app
from slimrl.observability.page import conversations as conversations_module
from slimrl.observability.page import follower as follower_module
from slimrl.observability.page.conversations import conversations
from slimrl.observability.page.document import page_contents, write_page
from slimrl.observability.page.follower import Follower
from slimrl.observability.page.server import PageServer
from slimrl.observability.run_files import read_runs


@pytest.fixture(autouse=True)
def without_rest(monkeypatch):
    monkeypatch.setattr(follower_module, "REST", 0.0)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "seed_0" / "gspo")


def keep_steps(run, count: int) -> None:
    """Make it a run that has just ended that step."""
    run.metrics.write_text("".join(json.dumps(metrics(step, 0)) + "\n" for step in range(1, count + 1)))
    for folder in (run.trajectories, run.expert_load):
        for path in folder.glob("*.parquet"):
            if int(path.stem.split("_")[1]) > count:
                path.unlink()


@contextmanager
def served(*runs, most=1000):
    server = PageServer(Follower([run.path for run in runs], "", most))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield Client(server)
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


class Client:
    def __init__(self, server: PageServer) -> None:
        self.address, self.key = server.address, server.key
        self.port = int(self.address.split(":")[2].split("/")[0])

    def ask(self, path: str, host: str | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    def data(self, version: int = 0):
        """The newest data; None if they have that version."""
        answer, text = self.ask(f"/data?key={self.key}&version={version}")
        assert (answer.status, text == "") in ((200, False), (204, True))
        return json.loads(text) if text else None


def without_times(data: dict) -> dict:
    return {name: value for name, value in data.items() if name not in ("made", "version")}


def test_a_request_needs_the_key_and_the_host_of_this_machine(run):
    with served(run) as client:
        assert client.address == f"http://127.0.0.1:{client.port}/?key={client.key}"
        assert len(client.key) >= 32
        for path in ("/", f"/?key={client.key}x", "/?key=", "/?key=%C3%A9", "/data", "/part?name=e0", "/elsewhere"):
            answer, text = client.ask(path)
            assert (answer.status, "gspo" in text) == (403, False), path
        for host in ("evil.example", f"evil.example:{client.port}", "127.0.0.1.evil.example", "[::1]:80"):
            assert client.ask(f"/?key={client.key}", host)[0].status == 403, host
        for host in ("localhost", "127.0.0.1", "localhost:8000"):
            answer, text = client.ask(f"/?key={client.key}", host)
            assert (answer.status, "gspo" in text) == (200, True), host
        assert client.ask(f"/elsewhere?key={client.key}")[0].status == 404
        assert client.ask(f"/part?key={client.key}&name=../../etc")[0].status == 404


def test_the_served_page_is_the_file_but_for_where_its_parts_are(run, tmp_path):
    contents = write_page([run.path], tmp_path / "page.html")
    written = (tmp_path / "page.html").read_text()
    with served(run) as client:
        answer, page = client.ask(f"/?key={client.key}")
        parts = {name: client.ask(f"/part?key={client.key}&name={name}")[1] for name in contents.parts}
    assert parts == contents.parts
    assert len(parts) == 1 + 2 * 2 * 4 * STEPS
    assert answer.headers["Cache-Control"] == "no-store"
    # The same up to the data: style, elements and policy; and the same scripts.
    of_written, of_page = (html.unescape(text.split('<script type="application/json"')[0]) for text in (written, page))
    assert "connect-src 'none'" in of_written
    assert of_page == of_written.replace("connect-src 'none'", "connect-src 'self'")
    scripts = written.split("</script>")[1:3]
    assert page.split("</script>")[1:3] == scripts
    assert len(page) < len(written)


def test_new_steps_come_with_a_new_version_and_nothing_comes_without(run, tmp_path):
    whole = shutil.copytree(run.path, tmp_path / "whole")
    keep_steps(run, 1)
    with served(run) as client:
        first = client.data()
        assert first["version"] == 1
        assert (first["runs"][0]["state"]["step"], set(first["trajectories"]["columns"]["step"])) == (1, {1})
        assert client.data(1) is None
        shutil.copytree(whole, run.path, dirs_exist_ok=True)
        second = client.data(1)
        assert second["version"] == 2
        assert without_times(second) == without_times(
            json.loads(json.dumps(page_contents([run.path], "", 1000).data))
        )  # fmt: skip
        assert set(second["trajectories"]["columns"]["step"]) == {1, 2, 3}
        assert client.data(2) is None
        # What was there has the same name.
        parts = [data["trajectories"]["columns"]["part"] for data in (first, second)]
        assert parts[1][: len(parts[0])] == parts[0]


def test_a_run_that_has_no_metrics_yet_is_starting(run):
    run.metrics.unlink()
    for folder in (run.trajectories, run.expert_load):
        shutil.rmtree(folder)
    with served(run) as client:
        assert client.data()["runs"][0]["state"]["word"] == "ended early"
        with folder_lock(run.path):
            data = client.data(1)
            assert (data["runs"][0]["state"]["word"], data["trajectories"]["shown"], data["panels"]) == (
                "starting",
                0,
                [],
            )
            keep_steps(run, 1)
            assert client.data(2)["runs"][0]["state"]["word"] == "running"
        assert client.data(3)["runs"][0]["state"]["word"] == "ended early"


def test_a_file_that_is_being_written_is_named_and_read_the_next_time(run):
    with served(run) as client:
        line = {"group_id": "g", "trajectory_id": "step_000001/00009/000", "status": "completed", "messages": []}
        run.sample_file(1).write_text(json.dumps(line)[:-9])
        answer, text = client.ask(f"/data?key={client.key}&version=1")
        assert (answer.status, "step_000001.jsonl" in text) == (503, True)
        run.sample_file(1).write_text(json.dumps(line))
        assert client.data(1)["trajectories"]["shown"] == 2 * 4 * STEPS + 1


def test_files_that_stayed_the_same_are_not_read_again(run, tmp_path, monkeypatch):
    whole = shutil.copytree(run.path, tmp_path / "whole")
    keep_steps(run, 2)
    follower = Follower([run.path], "", 1000)
    read = []
    original = conversations_module.read_recorded
    monkeypatch.setattr(conversations_module, "read_recorded", lambda path: read.append(path.name) or original(path))
    shutil.copy2(whole / "trajectories" / "step_000003.parquet", run.trajectories)
    assert follower.newest()[0] == 2
    assert read == ["step_000003.parquet"]


@pytest.mark.parametrize("most", [4, 9, 18, 100])
def test_what_is_kept_of_earlier_steps_gives_what_a_new_reading_gives(run, tmp_path, most):
    whole = shutil.copytree(run.path, tmp_path / "whole")
    known = {}
    for count in (1, 2, STEPS, 1):
        shutil.copytree(whole, run.path, dirs_exist_ok=True)
        keep_steps(run, count)
        runs = read_runs([run.path])
        assert conversations(runs, most, known) == conversations(runs, most)


def test_contents_that_take_long_are_made_seldom(run, monkeypatch):
    monkeypatch.setattr(follower_module, "REST", 1e6)
    follower = Follower([run.path], "", 10)
    keep_steps(run, 1)
    assert follower.newest()[0] == 1


def test_a_port_that_is_taken_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["report", str(run.path), "--follow", "--port", str(port)])
    assert result.exit_code == 2
    assert f"--port {port}: cannot be listened at" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--follow", "--html", "page.html"], "--follow and --html exclude each other."),
        (["--port", "8000"], "--port goes with --follow."),
        (["--trajectories", "5"], "--trajectories goes with --html or --follow."),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, arguments, says):
    result = CliRunner().invoke(app, ["report", str(run.path), *arguments])
    assert (result.exit_code, result.output.strip()) == (2, says)


def test_a_folder_of_no_run_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--follow"])
    assert result.exit_code == 2
    assert "no folder of a run: it has neither config.yaml nor metrics.jsonl" in " ".join(result.output.split())
