"""The setting of torch's allocator under which memory of a GPU cannot be handed to other processes as it is here.

With expandable segments a buffer has no CUDA IPC handle, and SGLang's memory saver does not work.
"""

import logging
import re
from collections.abc import MutableMapping

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that torch reads when it first allocates memory of a GPU."""

_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*true\s*", re.IGNORECASE)
_SETTINGS = re.compile(r",(?![^\[]*\])")
"""A comma between settings, not in a list in brackets."""


log = logging.getLogger(__name__)


def forbid_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Remove `expandable_segments:True` from inherited allocator settings, with a warning in the log."""
    for name in ALLOCATOR_SETTINGS:
        settings = _SETTINGS.split(environment.get(name, ""))
        kept = [setting for setting in settings if not _EXPANDABLE.fullmatch(setting)]
        if len(kept) < len(settings):
            del environment[name]
            if kept:
                environment[name] = ",".join(kept)
            log.warning("%s: removed expandable_segments:True, with which GPU memory cannot be shared here", name)
