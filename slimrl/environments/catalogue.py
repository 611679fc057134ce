"""The environments that slimrl knows, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).parent / "locks"
CONTAINER_COMMANDS = ("docker", "podman")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An environment that others made, in the folder of its name."""

    name: str
    summary: str
    """What it is, in a line"""
    packages: str
    """Packages that it is made of, each with its version and licence"""
    size_mb: int
    """Size of the virtual environment"""
    class_name: str
    """Name of its class, in the module `environment` of its folder"""
    own_process: bool = True
    """Whether it runs in the virtual environment; otherwise that makes the data alone"""
    programs: tuple[str, ...] = ()
    """Programs of the system that it needs"""
    containers: bool = False
    """Whether its episodes are in containers, so that it needs one of CONTAINER_COMMANDS"""
    check_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task that `slimrl-tools environment check` plays: made soon, and not solved by chance"""
    solver_options: Mapping[str, Any] = field(default_factory=dict)
    """Further ones where the scripted solution plays"""

    @property
    def lock(self) -> Path:
        """Requirements of its virtual environment, every package with its version."""
        return LOCKS / f"{self.name}.txt"

    @property
    def module(self) -> str:
        """Import path of its folder"""
        return f"slimrl.environments.{self.name}"

    @property
    def environment(self) -> str:
        """Import path of its class, as `agent.environment` names it"""
        return f"{self.module}.environment:{self.class_name}"


_ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="miniwob",
        summary="tasks on web pages, in a browser",
        packages="miniwob 1.1.0 (MIT), browsergym-miniwob 0.14.3 and playwright 1.44.0 (Apache 2.0)",
        size_mb=205,
        class_name="MiniwobEnvironment",
        check_options={"tasks": "login-user"},
        programs=("chromium",),
    ),
    Entry(
        name="bfcl",
        summary="function calling over several turns, with the leaderboard's own checker",
        packages="bfcl-eval 2026.3.23 (Apache-2.0), mpmath 1.3.0 (BSD-3-Clause)",
        size_mb=22,
        class_name="BfclEnvironment",
    ),
    Entry(
        name="textworld",
        summary="text adventures that are made by seed, of any number of rooms, things and commands",
        packages="textworld 1.7.0 (MIT), jericho 3.3.1 (GPL-2)",
        size_mb=110,
        class_name="TextWorld",
        check_options={"rooms": 3, "objects": 8, "min_quest": 3, "quest": 5},
    ),
    Entry(
        name="open_spiel",
        summary="board and card games of two, against itself or against opponents by script",
        packages="open_spiel 2.0.2 (Apache-2.0)",
        size_mb=69,
        class_name="OpenSpiel",
        solver_options={"opponents": "first"},
    ),
    Entry(
        name="textarena",
        summary="games and negotiations of two in text, against itself or against opponents by script",
        packages="textarena 0.7.4 (MIT)",
        size_mb=17,
        class_name="TextArena",
        solver_options={"opponents": "first"},
    ),
    Entry(
        name="textworld_express",
        summary="text games of eight kinds that need common sense, in Java: cooking, tidying, coins, maps, sums",
        packages="textworld-express 1.1.0 (Apache-2.0), py4j 0.10.9.9 (BSD-3-Clause), orjson 3.13.0 (MPL-2.0)",
        size_mb=15,
        class_name="TextWorldExpress",
        programs=("java",),
        check_options={"game": "cookingworld"},
    ),
    Entry(
        name="alfworld",
        summary="six kinds of household tasks in ALFWorld's domain, with rooms that are drawn by seed",
        packages="alfworld 0.4.2 (MIT), textworld 1.7.0 (MIT), fast-downward-textworld 20.6.4 (GPL-3), jericho (GPL-2)",
        size_mb=145,
        class_name="AlfWorld",
        programs=("cmake", "c++"),
    ),
    Entry(
        name="software_repair",
        summary="bugs in Python packages, with the packages' tests as the verdict",
        packages="swesmith 0.0.9, swebench 5.0.2 (MIT), libcst 1.9.0 (MIT, Apache-2.0, PSF); they make the tasks",
        size_mb=49,
        class_name="SoftwareRepair",
        own_process=False,
        check_options={"packages": "inflection"},
    ),
    Entry(
        name="swe_bench",
        summary="issues of whole repositories in SWE-bench's container images, with its eval scripts as the verdict",
        packages="swebench 5.0.2 (MIT), pyarrow 26.0.1 (Apache-2.0); they read the data and the logs",
        size_mb=171,
        class_name="SweBench",
        own_process=False,
        containers=True,
    ),
)
ENVIRONMENTS = {entry.name: entry for entry in _ENTRIES}


def entry_of(name: str) -> Entry:
    """Raises ValueError: there is no environment of this name."""
    if name not in ENVIRONMENTS:
        raise ValueError(f"no environment {name}; there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]
