"""Which engine serves a request: prefixes and loads, without tasks or clocks.

1. The load of an engine is the tokens that its running requests may come to hold: their inputs and the new tokens that
   they ask for.
2. A session stays on the engine of its last request, whose cache has its prefix. The first request of a session goes
   to an engine that had a first request with the same tokens, as those of a group have.
3. That engine is passed over where its load is above the least one by more than SPREAD_REQUESTS requests such as this,
   and by more than SPREAD_FRACTION of the least load. The request then goes to the engine with the least load.
4. An engine that could not be reached is avoided until it is forgiven, unless all are.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from slimrl.data.engine import GenerateRequest
from slimrl.data.seeds import derive_seed

SPREAD_REQUESTS = 4
"""Requests that a prefix may cost an engine more than the least loaded one has."""
SPREAD_FRACTION = 0.25
"""The same as a fraction of the least load, where that is more."""
MAX_PROMPTS = 10_000
"""First requests whose engines are remembered, the latest ones."""


def tokens_of(request: GenerateRequest) -> int:
    """Most tokens that it can come to hold in an engine's cache."""
    return len(request.input_ids) + request.max_new_tokens


@dataclass(kw_only=True)
class EngineChoice:
    """Engines are known by their addresses."""

    live: tuple[str, ...] = ()
    """Those that may serve"""
    avoided: set[str] = field(default_factory=set)
    loads: Counter[str] = field(default_factory=Counter)
    """Tokens of the running requests of each engine, also of those that left before their requests did"""
    sessions: dict[str, str] = field(default_factory=dict)
    """The last engine of each open session"""
    prompts: OrderedDict[int, set[str]] = field(default_factory=OrderedDict)
    """By the hash of a first request's tokens, the engines that had it"""

    def use(self, urls: Collection[str]) -> None:
        """These may serve from now on, and none is avoided."""
        self.live, self.avoided = tuple(dict.fromkeys(urls)), set()

    def begin(self, request: GenerateRequest) -> str | None:
        """The engine that serves the request, which runs until `end`; None without an engine."""
        usable = self._usable()
        if not usable:
            return None
        session = request.session_id
        key: int | str = session if session in self.sessions else hash(tuple(request.input_ids))
        has_prefix = self.prompts.get(key, set()) if isinstance(key, int) else {self.sessions[session]}
        url = self._least_loaded(usable, key)
        if known := [each for each in usable if each in has_prefix]:
            best = self._least_loaded(known, key)
            if self.loads[best] - self.loads[url] <= self._spread(request, self.loads[url]):
                url = best
        self.sessions[session] = url
        if isinstance(key, int):
            self._remember(key, url)
        self.loads[url] += tokens_of(request)
        return url

    def end(self, url: str, request: GenerateRequest) -> None:
        """A request that began on this engine has ended, in whatever way."""
        self.loads[url] -= tokens_of(request)

    def close(self, session_id: str) -> None:
        """Forget a session; unknown ones are ignored."""
        self.sessions.pop(session_id, None)

    def avoid(self, url: str) -> None:
        """It could not be reached."""
        self.avoided.add(url)

    def forgive(self, url: str) -> None:
        self.avoided.discard(url)

    @property
    def has_others(self) -> bool:
        """Whether an engine is there that is not avoided."""
        return any(url not in self.avoided for url in self.live)

    def _usable(self) -> list[str]:
        return [url for url in self.live if url not in self.avoided] or list(self.live)

    def _least_loaded(self, urls: Collection[str], key: int | str) -> str:
        """Of equal ones the same for each key, also in other processes."""
        least = min(self.loads[url] for url in urls)
        return min((url for url in urls if self.loads[url] == least), key=lambda url: derive_seed(key, url))

    def _spread(self, request: GenerateRequest, least: int) -> float:
        return max(SPREAD_REQUESTS * tokens_of(request), SPREAD_FRACTION * least)

    def _remember(self, prompt: int, url: str) -> None:
        self.prompts.setdefault(prompt, set()).add(url)
        self.prompts.move_to_end(prompt)
        if len(self.prompts) > MAX_PROMPTS:
            self.prompts.popitem(last=False)
