"""The main module of the router: `python -m slimrl.rollout.servers.launch_router PARENT_PID <arguments of smg>`."""

import sys


def main() -> None:
    from slimrl.sglang_plugin.lifeline import end_with

    end_with(int(sys.argv[1]))

    from smg.cli import main as smg

    smg(["launch", *sys.argv[2:]])


if __name__ == "__main__":
    main()
