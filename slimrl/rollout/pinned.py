"""Several engines without a router: a session's hash says which of them it stays on."""

from collections.abc import Sequence

from slimrl.data.protocols import Engine, GenerateRequest, GenerateResult
from slimrl.data.seeds import derive_seed


class PinnedEngines:
    """Implements Engine over a fixed list of engines."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        """Sessions need not be known here."""

    def close(self, session_id: str) -> None:
        """See `open`."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        index = derive_seed("session", request.session_id) % len(self._engines)
        return await self._engines[index].generate(request)

    async def aclose(self) -> None:
        for engine in self._engines:
            await engine.aclose()
