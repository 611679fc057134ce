"""Models of the Hugging Face Hub, which a recipe names by their id, such as `Qwen/Qwen3-30B-A3B`.

1. The driver fetches the model into its cache before anything starts. From then on `model.path` is the folder there,
   `.../models--Qwen--Qwen3-30B-A3B/snapshots/<commit>`.
2. Each process that reads the model first makes sure that its node has the commit at that same path, and fetches what
   is missing. huggingface_hub locks each file, so the processes of a node fetch it once.

huggingface_hub takes its cache, its token and whether there is a network from HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimrl.config.load import LoadedRecipe

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SNAPSHOT = re.compile(r"(?P<cache>.*)/models--(?P<account>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)")
"""Pattern of the path of a snapshot, the folder into which huggingface_hub puts one commit of a model."""

NO_ACCOUNTS = ("models", "datasets", "spaces")
"""First parts of the Hub's own pages: `models/NAME` is a folder."""

CONFIG_FILES = ("config.json",)
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Patterns of all files that slimrl reads but the weights."""
ALL_FILES = (*SMALL_FILES, "*.safetensors")
NOT_READ = ("original/*",)
"""Patterns of files that slimrl does not read: some models have their weights there in another format."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the Hub."""

    model_id: str
    revision: str | None = None
    """Commit of the model; None for the newest."""
    cache: Path | None = None
    """Folder of downloaded models; None for huggingface_hub's."""


def hub_model(path: str) -> HubModel | None:
    """What `model.path` names on the Hub; None for a folder.

    `a/b` is a folder too if there is a folder `a`: then `b` is misspelt.
    """
    if os.path.exists(path):
        return None
    if (snapshot := _snapshot_at(path)) is not None:
        return snapshot
    account = path.partition("/")[0]
    if account in NO_ACCOUNTS or os.path.exists(account) or not _is_model_id(path):
        return None
    return HubModel(model_id=path)


def _is_model_id(path: str) -> bool:
    """Whether it could be an id; the Hub has further rules about its characters."""
    if not MODEL_ID.fullmatch(path):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def fetch(model: HubModel, files: Sequence[str] = ALL_FILES) -> Path:
    """The model's folder in the cache; downloads what that lacks.

    Without a network the newest commit is the one that was fetched last.

    Args:
        files: patterns of those to fetch.

    Raises:
        ValueError: it is not in the cache and cannot be downloaded; says what to do.
    """
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if model.revision is not None and (folder := cached(model, files)) is not None:
        return folder
    try:
        return _snapshot(model, files, local_files_only=False)
    except LocalEntryNotFoundError as error:
        raise ValueError(_unreachable(model, error.__cause__ or error)) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{model.model_id}: {_REFUSED} {str(error).strip().splitlines()[0]}") from error
    except (httpx.HTTPError, ConnectionError) as error:
        raise ValueError(_unreachable(model, error)) from error
    except OSError as error:
        raise ValueError(f"{model.model_id}: could not be fetched from the Hugging Face Hub: {error}") from error


def cached(model: HubModel, files: Sequence[str] = ALL_FILES) -> Path | None:
    """The model's folder in the cache; None if some of these files are missing. Uses no network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(model, files, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder if _is_whole(folder, weights=files == ALL_FILES) else None


def _is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether a snapshot has what slimrl reads; other programs fetch single files."""
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))


def why_no_model(path: str) -> str:
    """Why there is no checkpoint at `path`, a folder or an id of the Hub; empty if there is. Uses no network."""
    hub = hub_model(path)
    if hub is not None and cached(hub) is None:
        said = f"no such folder, and {hub.model_id} is not whole in the cache of the Hugging Face Hub."
        return f"{path}: {said} Run `hf download {hub.model_id}`."
    if hub is None and not os.path.isdir(path):
        return f"{path}: no such folder."
    if hub is None and not os.path.isfile(Path(path) / "config.json"):
        return f"{path} has no config.json; a Hugging Face checkpoint is expected."
    return ""


def fetch_to_this_node(path: str) -> None:
    """Make sure that this node has all of `model.path`, if that is in a cache of the Hub.

    Raises:
        ValueError: see `fetch`.
    """
    if (snapshot := _snapshot_at(path)) is not None:
        fetch(snapshot)


def with_model(loaded: LoadedRecipe, folder: Path) -> LoadedRecipe:
    """The recipe with this folder as its model."""
    recipe = loaded.recipe
    return replace(loaded, recipe=replace(recipe, model=replace(recipe.model, path=str(folder))))


def with_teacher(loaded: LoadedRecipe, folder: Path) -> LoadedRecipe:
    """The recipe with this folder as its teacher."""
    recipe = loaded.recipe
    return replace(loaded, recipe=replace(recipe, teacher=replace(recipe.teacher, path=str(folder))))


def _snapshot_at(path: str) -> HubModel | None:
    """The commit of a model that is at this path of a cache, or belongs there."""
    found = SNAPSHOT.fullmatch(path)
    if found is None:
        return None
    model_id = f"{found['account']}/{found['name']}"
    return HubModel(model_id=model_id, revision=found["revision"], cache=Path(found["cache"]))


def _snapshot(model: HubModel, files: Sequence[str], *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.model_id,
            revision=model.revision,
            cache_dir=model.cache,
            allow_patterns=list(files),
            ignore_patterns=list(NOT_READ),
            local_files_only=local_files_only,
        )
    )


_REFUSED = (
    "no such folder, and the Hugging Face Hub does not give it out. Is the id right? A model with restricted access "
    "needs HF_TOKEN. It said:"
)


def _unreachable(model: HubModel, error: BaseException) -> str:
    from huggingface_hub import constants

    return (
        f"{model.model_id}: no such folder, not whole in the cache {model.cache or constants.HF_HUB_CACHE}, and the "
        f"Hugging Face Hub cannot be reached ({type(error).__name__}). Run `hf download {model.model_id}` where there "
        "is a network and set HF_HOME to where that put it, or set model.path to a folder."
    )
