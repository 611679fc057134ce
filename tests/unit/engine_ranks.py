"""Ranks of an engine, as its receivers and loaders see them."""


class OnlyRank:
    """Implements EngineRanks for an engine of one rank."""

    rank, size, per_node = 0, 1, 1

    def __init__(self):
        self.kept = {}

    def exchange(self, value):
        return [value]


class ThreadRank:
    """Implements EngineRanks for one of several threads, two of them on each node.

    Args:
        meeting: of all of them.
    """

    per_node = 2

    def __init__(self, rank, meeting):
        self.rank, self.size, self.kept, self._meeting = rank, meeting.size, {}, meeting

    def exchange(self, value):
        return self._meeting.exchange(self.rank, value)
