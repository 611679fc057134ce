"""The main module of an engine process.

`python -m slimrl.engines.plugin.launch PARENT_PID KEY_FD <arguments of sglang>`

1. Put the CPU stand-ins in place, before anything imports sglang. Processes that SGLang spawns import this
   module again before they unpickle their entry point, so theirs are in place too.
2. End with the parent (base/lifeline.py); children end with this process.
3. Load the plugins and make sure that ours is in force. SGLang's own request to freeze the garbage collector is left
   out: without a warm-up it comes before the server listens. EngineServer.wait_ready makes it instead.
4. Without a GPU, fork SGLang's children instead of spawning them: they start with everything imported, which
   saves two of three imports of some ten seconds each, and the memory of two of three copies. Spawned ones import
   again, with garbage collections.
5. Serve with the key that comes through the descriptor KEY_FD (engines/engine_key.py, key_check.py).
"""

import ctypes
import os
import signal
import sys

from slimrl.base.imports import imports_uncollected
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.plugin import cpu

cpu.install()

_PR_SET_PDEATHSIG = 1


def _end_with_parent_thread() -> None:
    """Make a child forked by the main thread die when that thread, and so the process, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _hook_start() -> None:
    """Register the hooks of the main process alone."""
    import multiprocessing

    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fork_children(result: None, server_args: object) -> None:
        if server_args.device == "cpu" and not torch.cuda.is_available():  # type: ignore[attr-defined]
            multiprocessing.set_start_method("fork", force=True)

    def no_freezing(server_args: object) -> None:
        """Do nothing at SGLang's warm-up: EngineServer.wait_ready asks for the freezing."""

    def no_settings(server_args: object) -> str:
        """What SGLang logs in place of its settings."""
        return "see config.yaml of the run"

    entrypoints = "sglang.srt.entrypoints"
    HookRegistry.register(f"{entrypoints}.engine._set_envs_and_config", fork_children, HookType.AFTER)
    HookRegistry.register(f"{entrypoints}.http_server._freeze_gc_after_server_warmup", no_freezing, HookType.REPLACE)
    HookRegistry.register(f"{entrypoints}.engine._server_args_for_logging", no_settings, HookType.REPLACE)


def main() -> None:
    from slimrl.base.lifeline import end_with

    end_with(int(sys.argv[1]))
    key = EngineKey.receive(int(sys.argv[2])).value
    os.register_at_fork(after_in_child=_end_with_parent_thread)
    with imports_uncollected():
        _hook_start()

        from sglang.srt.plugins import load_plugins

        load_plugins()

        from slimrl.engines.plugin.hooks import require_applied

        require_applied()

        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*sys.argv[3:], f"--api-key={key}", f"--admin-api-key={key}"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _end_with_parent_thread()
