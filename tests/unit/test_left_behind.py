"""benchmarks/left_behind.py finds what programs leave."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CODE = """
import json, subprocess, tempfile
from pathlib import Path
import left_behind
left_behind.SETTLE_S = 0.2
left_behind.adopt_orphans()
kept = Path(tempfile.gettempdir(), "kept")
kept.write_text("a")
before, cpu = left_behind.present(), left_behind.cpu_s()
assert left_behind.left(before) == []
started = subprocess.run(["sh", "-c", "setsid sleep 60 > /dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
pid = int(started.stdout)
kept.write_text("ab")
Path(tempfile.gettempdir(), "new").write_text("")
subprocess.run(["sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"])
assert left_behind.cpu_s() - cpu > 0.05
found = left_behind.left(before)
subprocess.run(["kill", str(pid)])
print(json.dumps([pid, *found]))
"""


def test_a_process_that_left_its_group_and_files_are_found(tmp_path: Path):
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=BENCHMARKS, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    pid, *found = json.loads(done.stdout)
    starts = [f"file {tmp_path}/kept 2 ", f"file {tmp_path}/new 0 ", f"no file {tmp_path}/kept 1 ", f"process {pid} s"]
    found = [line for line in found if not line.startswith("mount ")]  # those that the process sees
    assert all(line.startswith(start) for line, start in zip(found, starts, strict=True)), found
