"""Long commands say on a terminal how much time is left, and write no control characters into a pipe."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_run import make_run, make_trajectory
from slimrl_tools.toy.toy import ToySize, write_toy
from terminal_run import CONTROL, TerminalRun

from slimrl.observability.samples import readable

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RUN_S = 300.0
SLIMRL = [sys.executable, "-m", "slimrl.cli"]
TOOLS = [sys.executable, "-m", "slimrl_tools.cli"]
LEFT = r"\d+:\d\d:\d\d left"
SLOW_UV = """#!/bin/sh
# Installs 30 MB in three seconds, where it is told to: the folder of `--python`.
while [ "$1" != --python ]; do shift; done
folder=$(dirname "$(dirname "$2")")
for part in 1 2 3 4 5 6; do
    head -c 5000000 /dev/zero > "$folder/part_$part"
    sleep 0.5
done
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 130 MB, a graph, a downloaded data set, a run, and an installer that takes its time."""
    folder = tmp_path_factory.mktemp("bars")
    write_toy("qwen3_moe", folder / "model", ToySize(layers=4, hidden=512, moe_intermediate=512, experts=8), 0)
    rows = ({"question": f"What is {n} plus {n}?", "answer": f"It is so.\n#### {2 * n}"} for n in range(60_000))
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(folder / "run")
    for step in range(20, 40):
        made = (make_trajectory(step, group, 0, 30)[0] for group in range(1500))
        said = {"messages": [{"role": "user", "content": "What is it?"}]}
        run.sample_file(step).write_text("".join(json.dumps(readable(one) | said) + "\n" for one in made))
    subprocess.run([*TOOLS, "synthesize", "graph", str(folder / "graph"), "--facts", "3000"], check=True, timeout=RUN_S)
    (folder / "bin").mkdir()
    (folder / "bin" / "uv").write_text(SLOW_UV)
    (folder / "bin" / "uv").chmod(0o755)
    return folder


def arguments(work: Path, name: str, out: Path) -> list[str]:
    graph = work / "graph"
    return {
        "prepare": [*TOOLS, "prepare", "gsm8k", str(work / "gsm8k.jsonl"), f"{out}.jsonl"],
        "synthesize": [
            *TOOLS, "synthesize", "questions", str(graph / "graph.jsonl"), str(out),
            "--phrases", str(graph / "phrases.jsonl"), "--num", "300", "--heldout", "30", "--conversations", "30",
        ],
        "verify": [*TOOLS, "verify", str(work / "model"), str(work / "model"), "--json", "--logits", "8"],
        "quantize": [*TOOLS, "quantize", str(work / "model"), str(out)],
        "environment": [*TOOLS, "environment", "install", "bfcl"],
        "report": [*SLIMRL, "report", str(work / "run"), "--html", f"{out}.html"],
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shown", "said"),
    [
        ("prepare", rf"reading .* \d+000/60000 rows .*{LEFT}", "60000 problems of 60000 rows"),
        ("synthesize", rf"questions to train on .* \d+/300 questions .*{LEFT}", "300 + 30 questions"),
        ("verify", r"compare .* [MG]B/s \d:\d\d:\d\d[^┃]*logits .* \d/16 prompts .*" + LEFT, '"same": true'),
        ("quantize", r"quantize and check .* [MG]B/s \d:\d\d:\d\d", "quantize and check: "),
        ("environment", r"installing bfcl .*/22.0 MB .* \d:\d\d:\d\d", "installing bfcl: "),
        ("report", rf"page .* \d+/\d+ steps .*{LEFT}", "trajectories"),
    ],
)
def test_a_long_command_says_what_is_left_and_a_pipe_gets_plain_lines(work, tmp_path, name, shown, said):
    environment = {
        **os.environ,
        "PATH": f"{work / 'bin'}:{os.environ['PATH']}",
        "SLIMRL_ENVIRONMENTS": str(tmp_path / "environments"),
    }
    with TerminalRun(arguments(work, name, tmp_path / "on_terminal"), environment=environment) as terminal:
        assert terminal.end(RUN_S) == 0, terminal.text[-3000:]
        assert re.search(shown, terminal.text, re.DOTALL), terminal.text[-3000:]
        assert said in terminal.text
    environment["SLIMRL_ENVIRONMENTS"] = str(tmp_path / "again")
    command = arguments(work, name, tmp_path / "piped")
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=True)
    assert CONTROL.search(piped.stdout + piped.stderr) is None
    assert said in piped.stdout + piped.stderr
    if name == "verify":
        assert json.loads(piped.stdout)["same"] is True
