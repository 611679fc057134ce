"""Which devices trainer and engines share, as a recipe says it."""

from slimrl.config.schema import Recipe, TransportName


def shares_devices(recipe: Recipe) -> bool:
    """Whether engines are on the devices of trainer ranks: to take turns with their memory, or for `ipc` to reach
    them."""
    return recipe.rollout.colocated or recipe.resync.transport is TransportName.ipc
