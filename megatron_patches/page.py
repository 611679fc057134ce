"""docs/patches.md from the docstrings of the patches: `python -m megatron_patches.page > docs/patches.md`."""

import inspect

from megatron_patches import PATCHES, Patch

_INTRODUCTION = """# Changes to megatron-core

slimrl uses the megatron-core package as it is published and changes it in memory, when `slimrl.trainer` is imported.
Each change is one function in `megatron_patches/`, listed by megatron-core version; an unknown version is refused.
Most replace a literal in the source of one function and fail if it is not there exactly as often as expected, so a new
version cannot slip past them. Those whose absence would raise nothing are guarded by tests that compare numbers
(`tests/integration/test_layouts.py`, `test_trainer.py`).

This page is made from the docstrings by `python -m megatron_patches.page`. Lines are those below `megatron/core`.
"""


def patches_page() -> str:
    """The page in Markdown, all versions."""
    parts = [_INTRODUCTION]
    for version, patches in PATCHES.items():
        parts.append(f"## megatron-core {version}: faults on any device\n")
        parts += map(_entry, patches.any_device)
        parts.append(f"## megatron-core {version}: without CUDA\n")
        parts += map(_entry, patches.cpu_only)
    return "\n".join(parts)


def _entry(patch: Patch) -> str:
    module = patch.__module__.rpartition(".")[2]
    return f"**`{module}.{patch.__name__}`** {inspect.getdoc(patch)}\n"


if __name__ == "__main__":
    print(patches_page(), end="")
