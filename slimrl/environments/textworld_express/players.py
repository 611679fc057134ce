"""Scripted players: the same as TextWorld's, with the package's gold path as the walkthrough."""

from slimrl.environments.textworld.players import RandomPlayer, Solver

__all__ = ["RandomPlayer", "Solver"]
