"""Which test files have to notice a fault: unit tests, chosen by their imports, then integration tests of its package.

Integration tests drive whole commands, so their imports say little: a table has the files of each package, the shortest
and closest first.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from faults import SOURCES, Fault

_RUN = ["test_run_quickstart.py", "test_run_async.py"]
INTEGRATION = {
    "megatron_patches": ["test_trainer.py", "test_layouts.py"],
    "slimrl.agent": [
        "test_sandboxes.py",
        "test_session_files.py",
        "test_isolation.py",
        "test_environment_copies.py",
        "test_roles.py",
        "test_rollout.py",
        "test_run_quickstart.py",
    ],
    "slimrl.algorithms": ["test_update_scale.py", "test_trainer.py", "test_run_quickstart.py"],
    "slimrl.api": ["test_run_quickstart.py"],
    "slimrl.base": ["test_trainer.py", "test_rollout.py", "test_run_quickstart.py"],
    "slimrl.checkpoints": ["test_weights.py", "test_torch_dist.py", "test_convert.py", "test_resync_folders.py"],
    "slimrl.cli": ["test_run_quickstart.py", "test_plan.py"],
    "slimrl.config": ["test_plan.py", "test_run_quickstart.py"],
    "slimrl.data": ["test_trainer.py", "test_rollout.py", "test_run_quickstart.py"],
    "slimrl.device": ["test_trainer.py"],
    "slimrl.environments": ["test_isolation.py", "test_miniwob_pages.py", "test_software_repair.py"],
    "slimrl.estimates": ["test_plan.py", "test_plan_ranks.py", "test_simulate.py"],
    "slimrl.evaluation": ["test_run_evaluation.py", "test_run_quickstart.py"],
    "slimrl.launch": ["test_launch.py"],
    "slimrl.models": ["test_model_families.py", "test_weights.py", "test_coverage.py", "test_resync.py"],
    "slimrl.observability": ["test_trackers.py", "test_run_quickstart.py"],
    "slimrl.quantization": ["test_block_fp8.py", "test_resync_fp8.py"],
    "slimrl.resync": [
        "test_resync.py",
        "test_resync_folders.py",
        "test_resync_faults.py",
        "test_resync_fp8.py",
        "test_resync_p2p.py",
    ],
    "slimrl.rewards": [
        "test_symbolic_rewards.py",
        "test_code_rewards.py",
        "test_http_rewards.py",
        "test_run_quickstart.py",
    ],
    "slimrl.rollout": ["test_rollout.py", "test_resync.py", "test_run_async.py"],
    "slimrl.runtime": _RUN,
    "slimrl.engines": ["test_rollout.py", "test_delta_engines.py", "test_resync.py", "test_engine_ranks.py"],
    "slimrl.toys": ["test_resync_bench.py"],
    "slimrl.trainer": [
        "test_update_scale.py",
        "test_trainer.py",
        "test_layouts.py",
        "test_weights.py",
        "test_export.py",
        "test_offload.py",
    ],
    "slimrl_tools": ["test_convert.py", "test_checkpoint_tools.py"],
}
"""Package -> files of tests/integration."""


def unit_files(root: Path, fault: Fault) -> list[Path]:
    """Unit tests that import the fault's module, then its package, then a module that imports the fault's."""
    files = {path: _imported(path) for path in sorted((root / "tests" / "unit").glob("test_*.py"))}
    near = [path for path, names in files.items() if _has(names, fault.module)]
    far = [path for path, names in files.items() if _has(names, fault.package) and path not in near]
    users = [name for name, names in _sources(root).items() if _has(names, fault.module)]
    indirect = [path for path, names in files.items() if any(_has(names, user) for user in users)]
    return list(dict.fromkeys(near + far + indirect))


def integration_files(root: Path, fault: Fault) -> list[Path]:
    return [root / "tests" / "integration" / name for name in INTEGRATION[fault.package]]


@cache
def _sources(root: Path) -> dict[str, frozenset[str]]:
    """Dotted name of each module of the repository -> dotted names that it imports."""
    return {
        ".".join((top, *path.relative_to(root / folder).with_suffix("").parts)): frozenset(
            _names(ast.parse(path.read_text()))
        )
        for top, folder in SOURCES.items()
        for path in (root / folder).rglob("*.py")
    }


@cache
def _imported(path: Path) -> frozenset[str]:
    """Dotted names that a test file imports, itself or through a helper beside it."""
    names: set[str] = set()
    for name in _names(ast.parse(path.read_text())):
        helper = path.with_name(f"{name.split('.')[0]}.py")
        names |= _imported(helper) if helper.is_file() else {name}
    return frozenset(names)


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _has(names: frozenset[str], module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in names)
