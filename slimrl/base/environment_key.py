"""Secret keys that a user names by their environment variable."""

import os


def environment_key(name: str) -> str:
    """The key in an environment variable, without white space around it, which a header cannot have.

    Raises:
        ValueError: there is no such variable, or it holds other characters than printable ASCII. The message names the
            variable alone, and never shows its value.
    """
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"the environment has no variable {name}")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment's variable {name} is no key: it has characters beside printable ASCII")
    return key
