"""The engines of a role by their addresses: which of them serve, which wait for weights, and which are set aside."""

from collections.abc import Collection
from functools import partial

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode
from slimrl.data.engine import Engine
from slimrl.engines.client import SglangEngine
from slimrl.engines.engine_key import new_key
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.routing import RoutedEngines
from slimrl.runtime.cluster.engine_actor import EngineAddress


class EngineRoster:
    """Knows which engines serve, and tells the client."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.key = new_key()
        """Key of all engines of the role, those that are added or started again included"""
        self.addresses: list[EngineAddress] = []
        self._down: dict[str, str] = {}
        """Engines that have ended or do not answer, with the causes"""
        self._fresh: set[str] = set()
        """Names of engines that wait for weights"""
        self._aside: tuple[str, ...] | None = None
        """Names of the engines that are set aside for evaluations; None if none are"""
        self._client: RoutedEngines | None = None

    @property
    def receivers(self) -> list[EngineAddress]:
        """Engines that the next resync gives weights: those that are up and do not evaluate.

        On the trainer's devices also those that have ended: a resync replaces what fails in it.
        """
        others = {*(self._aside or ()), *(() if self._recipe.rollout.colocated else self._down)}
        return [address for address in self.addresses if address.name not in others]

    @property
    def counts(self) -> dict[str, float]:
        """How many engines there are of each kind; may be asked in any thread."""
        down, fresh, aside = {*self._down}, {*self._fresh} - {*self._down}, {*(self._aside or ())}
        serving = [one for one in self.addresses if one.name not in down | fresh | aside]
        return {"serving": len(serving), "evaluating": len(aside), "waiting": len(fresh - aside), "down": len(down)}

    @property
    def need_weights(self) -> bool:
        """Whether no engine serves, and one waits for weights."""
        return bool(self._fresh) and not self._serving

    @property
    def evaluation_is_lost(self) -> bool:
        """Whether none of the engines that were set aside is left."""
        return self._aside == ()

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role and node, pid) of actors and servers."""
        return tuple(
            (f"{address.name}, {process} on {node}", pid)
            for address in self.addresses
            for part, node in enumerate(address.nodes)
            for process, pid in zip(("actor", "server"), address.pids[2 * part : 2 * part + 2], strict=True)
        )

    def set_aside(self, count: int) -> int:
        """Have engines serve evaluations alone, with the weights that they have.

        Returns:
            How many there are: at most `count`, and fewer if no other would serve rollouts.
        """
        names = [address.name for address in self._serving]
        chosen = tuple(names[max(1, len(names) - count) :])
        if chosen:
            self._aside = chosen
            self._tell_client()
        return len(chosen)

    def take_back(self) -> None:
        """Have the engines that were set aside serve rollouts again, from the next resync on."""
        self._fresh |= set(self._aside or ())
        self._aside = None
        self._tell_client()

    def client(self, *, vocab_size: int, routed_experts_shape: tuple[int, int] | None) -> Engine:
        """The engines' client; it belongs to the event loop that first uses it."""
        urls = [address.url for address in self.addresses]
        resync = self._recipe.resync
        connect = partial(
            SglangEngine,
            key=self.key,
            vocab_size=vocab_size,
            routed_experts_shape=routed_experts_shape,
            keeps_caches=resync.pause is PauseMode.in_place or not resync.flush_cache,
        )
        if self._recipe.deterministic:
            return LockstepEngine([connect(url) for url in urls])
        self._client = RoutedEngines(connect, urls)
        return self._client

    def have_weights(self, names: Collection[str]) -> None:
        """Note that these engines have the current weights and serve."""
        self._fresh -= set(names)
        self._tell_client()

    @property
    def _serving(self) -> list[EngineAddress]:
        """Engines that serve rollouts."""
        others = {*self._down, *self._fresh, *(self._aside or ())}
        return [address for address in self.addresses if address.name not in others]

    def _put(self, fresh: EngineAddress, *, waits: bool) -> None:
        """Note that an engine is up, in the place of the one that had its name.

        Args:
            waits: it gets weights before it serves.
        """
        if fresh.name in {address.name for address in self.addresses}:
            self.addresses = [fresh if address.name == fresh.name else address for address in self.addresses]
        else:
            self.addresses = [*self.addresses, fresh]
        self._down.pop(fresh.name, None)
        if waits:
            self._fresh.add(fresh.name)

    def _drop(self, name: str) -> None:
        """Note that there is no such engine any more."""
        self.addresses = [address for address in self.addresses if address.name != name]
        self._fresh.discard(name)
        self._down.pop(name, None)

    def _tell_client(self) -> None:
        if self._aside is not None:
            known = {address.name for address in self.addresses}
            self._aside = tuple(name for name in self._aside if name in known and name not in self._down)
        if self._client is None:
            return
        evaluating = None
        if self._aside is not None:
            evaluating = [address.url for address in self.addresses if address.name in self._aside]
        self._client.use([address.url for address in self._serving], evaluating)
