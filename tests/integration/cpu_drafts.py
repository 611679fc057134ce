"""Lets an engine without a GPU hold a draft model, so that resyncs reach it. It cannot draft.

A plugin of SGLang, found through `plugin_folder` on the engine's PYTHONPATH.
"""

import os
from pathlib import Path


def plugin_folder(folder: Path) -> str:
    """Make the plugin known in a new folder; returns the PYTHONPATH of an engine that shall load it."""
    about = folder / "cpu_drafts-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-drafts\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\ncpu_drafts = cpu_drafts:register\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def register() -> None:
    """Leave out what SGLang does for drafting: kernels, and waiting for a GPU."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    for target in (
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backend",
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
    ):
        HookRegistry.register(target, lambda *_: None, HookType.REPLACE)
