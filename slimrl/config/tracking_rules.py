"""Rules of the section `tracking`: which trackers there are, where spans go, and who may send to wandb's server."""

import importlib.metadata
import importlib.util
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import WandbMode

TRACKED = ("train", "train --trajectories", "sft")
"""Commands that write metrics"""
KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
EXPORTER = "opentelemetry-exporter-otlp-proto-http"


def tracking_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """An address for spans that is none, or that would show a password in the run's records."""
    if not (given := recipe.tracking.opentelemetry) or command not in TRACKED:
        return
    url = urlsplit(given)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        yield (
            "tracking.opentelemetry",
            f"{given}: not the URL of an OTLP endpoint for HTTP, to which /v1/traces is added. Give one such as "
            "http://localhost:4318.",
        )
    elif "@" in url.netloc:
        yield (
            "tracking.opentelemetry",
            "a user or password in the URL would be in the run's records. Put what the endpoint asks for into the "
            "variable OTEL_EXPORTER_OTLP_HEADERS.",
        )


def tracking_warnings(recipe: Recipe, command: str, *, home: bool = True) -> Iterator[Violation]:
    """A run that is to send its metrics and has no account to do so; reads the environment and the login file.

    Args:
        home: the run sees the user's home folder, where `wandb login` writes the key.
    """
    if command in TRACKED and recipe.tracking.wandb is WandbMode.online and not has_wandb_key(home=home):
        yield (
            "tracking.wandb",
            f"online needs an API key of {wandb_host()}: {missing_key_text(home=home)}. Without one the run is written "
            "into its folder, for a later `wandb sync`.",
        )


def missing_trackers(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Trackers of the recipe whose packages this Python has not."""
    for name in recipe.tracking.more if command in TRACKED else ():
        if importlib.util.find_spec(name.value) is None:
            yield (
                "tracking.more",
                f"{name.value} needs the package of that name. Install it with: "
                f"pip install -c requirements/lock.txt {name.value}",
            )
    if recipe.tracking.opentelemetry and command in TRACKED and not _is_installed(EXPORTER):
        yield (
            "tracking.opentelemetry",
            f"needs the package {EXPORTER}. Install it with: pip install -c requirements/lock.txt {EXPORTER}",
        )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing_key_text(*, home: bool = True) -> str:
    where = "`wandb login` has left none" if home else "a container does not see what `wandb login` left in your home"
    return f"WANDB_API_KEY is not set, and {where}"


def wandb_host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc


def has_wandb_key(*, home: bool = True) -> bool:
    """Whether wandb finds a key for its server, in the environment or where `wandb login` writes it."""
    return any(map(os.environ.get, KEY_VARIABLES)) or (home and _login_file_has_key())


def _login_file_has_key() -> bool:
    given = os.environ.get("NETRC")
    files = [Path(given).expanduser()] if given else [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return False
    try:
        found = netrc.netrc(file).authenticators(wandb_host())
    except (netrc.NetrcParseError, OSError):
        return False  # as wandb takes it
    return found is not None and bool(found[2])
