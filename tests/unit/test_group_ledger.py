"""The ledger of groups as a killed run leaves it."""

import json
from pathlib import Path

from slimrl.rollout.group_ledger import GroupLedger


def test_a_line_that_was_cut_off_does_not_keep_a_run_from_going_on(tmp_path: Path):
    path = tmp_path / "groups.jsonl"
    ledger = GroupLedger(path)
    for step in (1, 2):
        ledger.add(step, [{"group": 2 * step, "end": "taken"}, {"group": 2 * step + 1, "end": "failed"}])
    whole = path.read_text()
    for length in (len(whole) - 5, len(whole) - 1, len(whole)):
        path.write_text(whole[:length])
        ledger.keep(1)
        assert [json.loads(line)["group"] for line in path.read_text().splitlines()] == [2, 3]
        ledger.add(2, [{"group": 4}])
        assert [json.loads(line)["group"] for line in path.read_text().splitlines()] == [2, 3, 4]
