"""What commands keep from the terminal."""

import warnings


def quiet_megatron() -> None:
    """megatron-core's import warns of libraries that only training on GPUs needs."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
