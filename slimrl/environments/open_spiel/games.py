"""Games of OpenSpiel (arXiv:1908.09453) as text: their rules in a sentence or two, what a player sees, its moves."""

from difflib import get_close_matches

import pyspiel

from slimrl.environments.open_spiel.players import MOVES, SEPARATOR

RULES = {
    "tic_tac_toe": "x begins. Three marks in a row, a column or a diagonal win.",
    "connect_four": "x begins. A piece falls to the lowest free place of its column. Four in a line win.",
    "hex": "x begins and joins the upper and the lower edge; o joins the left and the right one.",
    "breakthrough": "Pieces go one step forward, straight or diagonally, and take diagonally. The first to reach the "
    "other side wins. b begins at the top, w at the bottom.",
    "othello": "x begins. A piece turns all pieces of the other colour that it encloses in a line. Most pieces win.",
    "mancala": "Sow the seeds of a pit, one in each that follows. A last seed in the own store gives another move. "
    "Most seeds win.",
    "dots_and_boxes": "Draw a line between two dots. Who closes a box has it and moves again. Most boxes win.",
    "nim": "Take any number of objects from one pile. Who takes the last one loses.",
    "pig": "Roll a die as often as wanted and keep the sum, or lose it with a 1. The first to reach the score wins, "
    "100 if the name says no other.",
    "kuhn_poker": "Each player has one of the cards 0, 1 and 2 and has paid 1. A bet costs 1 more; who passes after a "
    "bet folds. The higher card wins. The text is the own card and what was done, p for pass and b for bet.",
    "leduc_poker": "Six cards, two of each of three ranks. Each player has one; one is shown after the first round "
    "of bets. A pair with it wins, or else the higher card.",
    "liars_dice": "Each player has dice that the other does not see. Bid a number and a face that both together have "
    "at least, higher than before, or call the last bid a lie. The text is the own dice and the bids; 6 is wild.",
    "goofspiel": "All bid a card of the hand for each point card at once; the higher bid has its points.",
    "first_sealed_auction": "Bid once, unseen. The highest bid buys and pays it. Your value of the thing is shown.",
    "negotiation": "Divide a pool of items. Each proposal says what the proposer takes; the other agrees or proposes.",
}
"""The games that were tried here, by OpenSpiel's name"""
ROLE = "player_"


def load(name: str) -> pyspiel.Game:
    """A game in which players move one after another.

    Args:
        name: as OpenSpiel writes it, with parameters in brackets, such as `hex(board_size=4)`.

    Raises:
        ValueError: OpenSpiel has no such game, none of these parameters, or it is none for two.
    """
    plain = name.partition("(")[0].strip()
    if plain not in pyspiel.registered_names():
        near = get_close_matches(plain.replace(" ", "_"), pyspiel.registered_names(), n=1)
        meant = f" Did you mean {near[0]}?" if near else f" Tried were {', '.join(RULES)}."
        raise ValueError(f"OpenSpiel has no game {plain!r}.{meant} Several games are separated by semicolons.")
    try:
        game = pyspiel.load_game_as_turn_based(name)
    except (RuntimeError, pyspiel.SpielError) as error:
        raise ValueError(f"game {name}: {error}") from error
    if game.num_players() != 2:
        raise ValueError(f"game {name}: has {game.num_players()} players; games of two are played here")
    return game


def rules(name: str) -> str:
    return RULES.get(name.partition("(")[0], "")


def role_of(player: int) -> str:
    return f"{ROLE}{player}"


def seen(state: pyspiel.State, player: int) -> str:
    """What a player knows of a state: its information where not all is open, or else the board."""
    kind = state.get_game().get_type()
    hidden = kind.information != pyspiel.GameType.Information.PERFECT_INFORMATION
    if kind.provides_information_state_string and (hidden or not kind.provides_observation_string):
        return str(state.information_state_string(player)).rstrip()
    if kind.provides_observation_string:
        return str(state.observation_string(player)).rstrip()
    return str(state).rstrip()


def moves(state: pyspiel.State) -> dict[str, int]:
    """Moves of the player whose turn it is: text -> OpenSpiel's number."""
    player = state.current_player()
    return {str(state.action_to_string(player, action)).strip(): action for action in state.legal_actions()}


def said(state: pyspiel.State) -> str:
    """What the player whose turn it is is told."""
    return f"{seen(state, state.current_player())}\n{MOVES}{SEPARATOR.join(moves(state))}"


def introduced(name: str, state: pyspiel.State) -> str:
    """The same, before the player's first turn."""
    marks = f"You are player {state.current_player()} of {state.get_game().num_players()}."
    return "\n".join(part for part in (f"Game: {name}. {rules(name)}".strip(), marks, said(state)) if part)


def chosen(text: str, state: pyspiel.State) -> int | None:
    """The move that the last line of a text says, as it is listed, whatever its case and spaces; None if it is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    known = moves(state)
    if not lines:
        return None
    last = _plain(lines[-1])
    exact = [action for name, action in known.items() if name == lines[-1].strip()]
    alike = [action for name, action in known.items() if _plain(name) == last]
    found = exact or alike
    return found[0] if len(found) == 1 else None


def _plain(text: str) -> str:
    return "".join(text.lower().rstrip(".; ").split())
