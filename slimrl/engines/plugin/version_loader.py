"""How an engine loads a version of the weights from a folder: directly, or through a copy on its own disk.

/update_weights_from_disk carries a dictionary that SGLang itself does not use (`manifest`) to every process of the
engine. The hook of SchedulerWeightUpdaterManager.update_weights_from_disk reads it and leaves other requests alone.

1. One process brings the engine's copy to the version, and the others wait for it (local_copy.py).
2. The processes exchange their errors; if there is one, none of them loads anything.
3. SGLang reloads its weights from a folder that is known to be whole.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_KEY = "slimrl_version"


def version_request(folder: str, local_dir: str | None, timeout_s: float) -> dict[str, Any]:
    """Body of /update_weights_from_disk.

    Args:
        folder: of the version.
        local_dir: of the engine's copy on its node; None to load the folder itself, which must be a whole version.
        timeout_s: how long a process waits for another one to update the copy.
    """
    return {
        "model_path": folder,
        "load_format": "auto",
        "flush_cache": False,
        "manifest": {_KEY: {"local_dir": local_dir, "timeout_s": timeout_s}},
    }


def around_update_from_disk(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Hook of SchedulerWeightUpdaterManager.update_weights_from_disk."""
    if _KEY not in (recv_req.manifest or {}):
        return original(manager, recv_req)
    import msgspec
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    with ExitStack() as stack:
        problem, folder = "", recv_req.model_path
        try:
            folder = str(stack.enter_context(_checkpoint(Path(recv_req.model_path), **recv_req.manifest[_KEY])))
        except (ValueError, OSError, TimeoutError) as error:
            problem = str(error)
        if problems := _of_all_ranks(problem, manager.tp_cpu_group):
            return UpdateWeightFromDiskReqOutput(success=False, message="; ".join(problems))
        return original(manager, msgspec.structs.replace(recv_req, model_path=folder))


@contextmanager
def _checkpoint(version: Path, local_dir: str | None, timeout_s: float) -> Iterator[Path]:
    """The folder to load from; nobody changes it during the block."""
    from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
    from slimrl.checkpoints.versions.local_copy import LocalCopy
    from slimrl.checkpoints.versions.manifest import check_files, read_manifest

    if local_dir is not None:
        with LocalCopy(Path(local_dir)).at(version, timeout_s) as folder:
            yield folder
        return
    check_files(version, read_manifest(version))
    SafetensorsFolder(version).close()
    yield version


def _of_all_ranks(problem: str, group: Any) -> list[str]:
    """The problems of all processes of the engine, each once, with its host where they are on several."""
    import torch.distributed as dist

    gathered = [("", "")] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (socket.gethostname(), problem), group=group)
    several = len({host for host, _ in gathered}) > 1
    return sorted({f"on {host}: {text}" if several else text for host, text in gathered if text})
