"""The choice of the engine that serves a request: prefixes and loads, without tasks or clocks.

1. The load of an engine is the tokens that its running requests may come to hold: their inputs and the new tokens that
   they ask for.
2. The engine of a session's last request has its prefix. For the first request of a session these are the engines that
   had a first request with the same tokens, as those of a group have.
3. A request goes to the engine where its input, if it has to be read, and the load come to the least. An input token
   counts as READ_WEIGHT tokens of load: a session moves only when its engine has so much more to do than another.
4. An engine that could not be reached is avoided until it is forgiven, unless all are.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from slimrl.base.seeds import derive_seed
from slimrl.data.engine import GenerateRequest

READ_WEIGHT = 16
"""Tokens of load that an engine may have beyond the least loaded one for each input token that it need not read."""
MAX_PROMPTS = 10_000
"""Number of first requests whose engines are remembered, the latest ones."""


def tokens_of(request: GenerateRequest) -> int:
    """Most tokens that a request can come to hold in an engine's cache."""
    return len(request.input_ids) + request.max_new_tokens


@dataclass(kw_only=True)
class EngineChoice:
    """The engines' loads and prefixes, by which a request's engine is chosen. Engines are known by their addresses."""

    live: tuple[str, ...] = ()
    """Addresses of the engines that may serve"""
    avoided: set[str] = field(default_factory=set)
    loads: Counter[str] = field(default_factory=Counter)
    """Tokens of the running requests of each engine, also of those that left before their requests did"""
    sessions: dict[str, str] = field(default_factory=dict)
    """Address of the last engine of each open session"""
    prompts: OrderedDict[int, set[str]] = field(default_factory=OrderedDict)
    """Addresses of the engines that had a first request, by the hash of its tokens"""

    def use(self, urls: Collection[str]) -> None:
        """Let these engines serve from now on; none of them is avoided."""
        self.live, self.avoided = tuple(dict.fromkeys(urls)), set()

    def begin(self, request: GenerateRequest) -> str | None:
        """The engine that serves the request, which runs until `end`; None without an engine."""
        usable = self.usable
        if not usable:
            return None
        session = request.session_id
        key: int | str = session if session in self.sessions else hash(tuple(request.input_ids))
        has_prefix = self.prompts.get(key, set()) if isinstance(key, int) else {self.sessions[session]}
        unread = READ_WEIGHT * len(request.input_ids)
        costs = {url: self.loads[url] + (0 if url in has_prefix else unread) for url in usable}
        least = min(costs.values())
        # Among equal ones always the same for a key, also in other processes.
        url = min((url for url in usable if costs[url] == least), key=lambda url: derive_seed(key, url))
        self.sessions[session] = url
        if isinstance(key, int):
            self._remember(key, url)
        self.loads[url] += tokens_of(request)
        return url

    def end(self, url: str, request: GenerateRequest) -> None:
        """A request that began on this engine has ended, in whatever way."""
        self.loads[url] -= tokens_of(request)

    def close(self, session_id: str) -> None:
        """Drop a session; unknown ones are ignored."""
        self.sessions.pop(session_id, None)

    def avoid(self, url: str) -> None:
        """Avoid an engine that could not be reached."""
        self.avoided.add(url)

    def forgive(self, url: str) -> None:
        self.avoided.discard(url)

    @property
    def has_others(self) -> bool:
        """Whether an engine is there that is not avoided."""
        return any(url not in self.avoided for url in self.live)

    @property
    def usable(self) -> list[str]:
        """Addresses of the engines that are not avoided, or of all where all are."""
        return [url for url in self.live if url not in self.avoided] or list(self.live)

    def _remember(self, prompt: int, url: str) -> None:
        self.prompts.setdefault(prompt, set()).add(url)
        self.prompts.move_to_end(prompt)
        if len(self.prompts) > MAX_PROMPTS:
            self.prompts.popitem(last=False)
