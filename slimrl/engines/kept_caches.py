"""The sampled tokens that attend to keys and values of older weights, where a resync keeps caches.

The client knows of a session, position by position, which version computed its keys and values:
1. What an answer says was cached (`cached_tokens`, a prefix) is as old as when the session last computed it. A prefix
   that other sessions have put into the cache, such as the prompt of a group, counts as of the session's own version.
2. The rest of the prompt is of the version that sampled the answer's first token, and each sampled token of its own.
3. A token is stale if an earlier position is of a lower version than its own.
"""

from itertools import groupby

import numpy as np


class SessionCache:
    """The versions of one session's cached keys and values; answers must be added in order."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []
        """(end, version) of positions that one version computed, in order"""

    def add(self, num_prompt: int, num_cached: int, versions_T: np.ndarray) -> int:
        """Add an answer of the engine.

        Args:
            num_prompt: tokens of the request.
            num_cached: how many of them were in the engine's cache.
            versions_T: int32, the version that sampled each token; they do not fall.

        Returns:
            How many of its tokens are stale.
        """
        if not len(versions_T):
            # Aborted before its first token.
            return 0
        first, begin, kept = int(versions_T[0]), 0, []
        for end, version in self._runs:
            if begin < num_cached:
                kept.append((min(end, num_cached), version))
            begin = end
        oldest = min([first, *(version for _, version in kept)])
        end = num_prompt
        self._runs = [*kept, (end, first)]
        for version, tokens in groupby(versions_T.tolist()):
            end += len(list(tokens))
            self._runs.append((end, version))
        return int((versions_T > oldest).sum())
