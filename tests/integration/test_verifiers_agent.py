"""docs/examples/verifiers_agent.py with the real verifiers library, in an environment of its own."""

import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from own_venv import UV, own_venv

from slimrl.agent.gateway.once_pipe import KEY_VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "docs" / "examples" / "verifiers_agent.py")
ENV = json.dumps({"taskset": {"id": "verifiers_words", "words": ["apple", "grape"]},
                  "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}})  # fmt: skip


class Policy(ThreadingHTTPServer):
    """Answers each question with `answer`, and keeps the rewards that are posted."""

    def __init__(self, answer: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.rewards, self.keys = answer, [], [], set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Policy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys.add((self.path, self.headers["authorization"]))
        if self.path == "/reward":
            self.server.rewards.append(body["reward"])
            return self.send("application/json", json.dumps(body))
        assert self.path == "/v1/chat/completions"
        self.server.asked.append(body["messages"][-1]["content"])
        assert body["stream"]
        head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        delta = {"role": "assistant", "content": self.server.answer}
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {**head, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
        ]
        events = [f"data: {text}\n\n" for text in (*map(json.dumps, chunks), "[DONE]")]
        return self.send("text/event-stream", "".join(events))

    def send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_venv(tmp_path_factory.mktemp("verifiers"), "verifiers==0.4.0")


@pytest.fixture
def policy():
    server = Policy("I say elppa.")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(python: str, *words: str, line: dict | None = None, url: str = "") -> subprocess.CompletedProcess[str]:
    key, write_end = os.pipe()
    os.write(write_end, b"key-2\n")
    os.close(write_end)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests"), "PATH": f"{UV.parent}:{os.environ['PATH']}",
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "key-1", "SLIMRL_REWARD_URL": f"{url}/reward",
        KEY_VARIABLE: str(key),
    }  # fmt: skip
    try:
        return subprocess.run(
            [python, SCRIPT, *words],
            input=json.dumps(line),
            env=environment,
            pass_fds=[key],
            capture_output=True,
            text=True,
            timeout=280,
        )
    finally:
        os.close(key)


def test_tasks_are_written_as_prompts_of_a_data_file(python):
    lines = [json.loads(line) for line in run(python, ENV, "--prompts").stdout.splitlines()]
    assert lines == [
        {"prompt": f"Write {word} backwards.", "label": None, "task": number}
        for number, word in enumerate(("apple", "grape"))
    ]


@pytest.mark.parametrize(("task", "reward"), [(0, 0.5), (1, 0.0)])
def test_a_task_is_played_against_the_base_url_and_its_reward_posted(python, policy, task, reward):
    done = run(python, ENV, line={"id": "p", "messages": [], "label": None, "metadata": {"task": task}}, url=policy.url)
    assert done.returncode == 0, done.stderr
    assert policy.asked == [f"Write {('apple', 'grape')[task]} backwards."]
    assert policy.rewards == [reward]
    assert policy.keys == {("/v1/chat/completions", "Bearer key-1"), ("/reward", "Bearer key-2")}


def test_an_episode_that_fails_is_an_exit_code_with_its_cause(python):
    done = run(python, ENV, line={"metadata": {"task": 0}}, url="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "task 0 failed: type='ProviderError'" in done.stderr
