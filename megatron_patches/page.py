"""The last section of docs/internals.md, from the docstrings of the patches.

`python -m megatron_patches.page` writes it.
"""

import inspect
from pathlib import Path

from megatron_patches import (
    ANY_DEVICE,
    CPU_ONLY,
    VERSION,
    WITH_TRANSFORMER_ENGINE,
    WITHOUT_TRANSFORMER_ENGINE,
    Patch,
)

PAGE = Path(__file__).parents[1] / "docs" / "internals.md"
_HEADING = "## Changes to megatron-core\n"
_INTRODUCTION = f"""{_HEADING}
slimrl installs megatron-core {VERSION} as published and changes it in memory when `slimrl.trainer` is imported.
Each change is one function in `megatron_patches/`; another version of megatron-core is refused.
Most patches replace text in the source of one function, and fail unless it occurs exactly as often as expected: a
changed version cannot run unpatched. Tests that compare numbers guard the patches without which nothing would raise
(`tests/integration/test_layouts.py`, `test_trainer.py`).

`python -m megatron_patches.page` makes this section from the docstrings. Files are relative to `megatron/core`.
"""


def with_patches(page: str) -> str:
    """The page in Markdown with its last section made anew; ValueError if it lacks that section's heading."""
    return page[: page.index(_HEADING)] + _section()


def _section() -> str:
    parts = [_INTRODUCTION, "### Faults and slow places on any device\n", *map(_entry, ANY_DEVICE)]
    parts += ["### With Transformer Engine\n", *map(_entry, WITH_TRANSFORMER_ENGINE)]
    parts += ["### Without Transformer Engine\n", *map(_entry, WITHOUT_TRANSFORMER_ENGINE)]
    return "\n".join([*parts, "### Without CUDA\n", *map(_entry, CPU_ONLY)])


def _entry(patch: Patch) -> str:
    module = patch.__module__.rpartition(".")[2]
    return f"**`{module}.{patch.__name__}`** {inspect.getdoc(patch)}\n"


if __name__ == "__main__":
    PAGE.write_text(with_patches(PAGE.read_text()))
