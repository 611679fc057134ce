"""The main module of an engine process: `python -m slimrl.rollout.launch PARENT_PID <arguments of sglang>`.

1. Put the CPU stand-ins in place, before anything imports sglang. Processes that SGLang spawns import this
   module again before they unpickle their entry point, so theirs are in place too.
2. End with the parent (lifeline.py); children end with this process.
3. Load the plugins and make sure that ours is in force. SGLang's own request to freeze what garbage collections
   look at is left out: without a warm-up it comes before the server listens. Who starts the server makes it.
4. Without a GPU, fork SGLang's children instead of spawning them: they start with everything imported, which
   saves two of three imports of some ten seconds each, and the memory of two of three copies.
"""

import ctypes
import os
import signal
import sys

from slimrl.rollout import sglang_cpu

sglang_cpu.install()

_PR_SET_PDEATHSIG = 1


def _end_with_parent_thread() -> None:
    """In a child that this process's main thread made: be killed when that thread, so this process, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _fork_children() -> None:
    import multiprocessing

    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_set_envs(result: None, server_args: object) -> None:
        if server_args.device == "cpu" and not torch.cuda.is_available():  # type: ignore[attr-defined]
            multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", after_set_envs, HookType.AFTER)


def _leave_freezing_to_the_starter() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def no_request(server_args: object) -> None:
        """EngineServer.wait_ready does it."""

    target = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
    HookRegistry.register(target, no_request, HookType.REPLACE)


def _leave_settings_out_of_the_log() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def where_they_are(server_args: object) -> str:
        return "as config.yaml of the run has them"

    target = "sglang.srt.entrypoints.engine._server_args_for_logging"
    HookRegistry.register(target, where_they_are, HookType.REPLACE)


def main() -> None:
    from slimrl.rollout.lifeline import end_with

    end_with(int(sys.argv[1]))
    os.register_at_fork(after_in_child=_end_with_parent_thread)
    _fork_children()
    _leave_freezing_to_the_starter()
    _leave_settings_out_of_the_log()

    from sglang.srt.plugins import load_plugins

    load_plugins()

    from slimrl.rollout.sglang_plugin import require_applied

    require_applied()

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[2:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _end_with_parent_thread()
