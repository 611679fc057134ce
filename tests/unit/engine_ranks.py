"""Ranks of an engine, as its receivers and loaders see them."""


class OnlyRank:
    """Implements EngineRanks for an engine of one rank."""

    rank, per_node = 0, 1

    def __init__(self):
        self.kept = {}

    def exchange(self, value):
        return [value]
