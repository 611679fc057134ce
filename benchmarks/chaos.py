"""Runs of three modes to which faults of 29 kinds happen at random times, and what became of them.

1. A small toy learns by imitation to call the calculator.
2. Each leg (chaos_legs.py) is a run over several Ray nodes on this machine. At random times, which follow from the
   seed, a fault (chaos_kinds.py) happens to it, each kind about as often. The next one waits until the run has
   recovered.
3. A run that a fault ends is continued with `--resume-or-start`, after what the fault has broken was mended.
4. A deterministic run is compared with one to which nothing happened, bit by bit; of an asynchronous one each group is
   accounted for (fault_ledger.py); processes, shared memory and files that are left are a problem (chaos_judge.py).

It has a network, mounts, processes and shared memory of its own, and so needs root (chaos_namespaces.py). `--merge`
prints the tables of several results. The exit code is 1 if anything was found.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from chaos_legs import LEGS, MODES
from chaos_namespaces import PRIVATE, run_inside, what_is_missing
from chaos_table import figures, merged, problems, table_of_kinds, table_of_legs
from figures import write_figures
from rich.console import Console

TESTS = Path(__file__).parents[1] / "tests" / "integration"
"""What starts commands and Ray nodes there serves here too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="of the model and the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="in which the faults happen, all legs together")
    parser.add_argument("--faults", type=int, help="all legs together (each kind of each leg once)")
    parser.add_argument("--kind", action="append", help="kinds of faults (all)")
    parser.add_argument("--mode", action="append", choices=MODES, help="modes (all)")
    parser.add_argument("--leg", action="append", choices=[leg.name for leg in LEGS], help="legs (all of the modes)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-updates", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="only the tables of these results")
    options = parser.parse_args()
    if not options.merge and PRIVATE not in os.environ:
        if reason := what_is_missing():
            sys.exit(f"benchmarks/chaos.py: {reason}.")
        sys.exit(run_inside())
    if options.merge:
        records, verdicts = merged(json.loads(file.read_text()) for file in options.merge)
    else:
        # So that what was started is ended.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        sys.path.append(str(TESTS))
        from chaos_session import session

        records, verdicts = session(options, lambda *so_far: write_figures(options.json, figures(*so_far)))
    found = problems(records, verdicts)
    write_figures(options.json, {**figures(records, verdicts), "problems": found})
    console = Console(width=140)
    console.print(table_of_kinds(records), table_of_legs(verdicts))
    for text in found:
        console.print(text, markup=False)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
