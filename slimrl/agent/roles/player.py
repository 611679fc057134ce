"""Who plays a role in place of the policy: a function, or an object of a class that is made once (`agent.players`)."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from slimrl.agent.environment import EnvironmentFailure, Message
from slimrl.config.import_path import resolve
from slimrl.config.problems import suggestion
from slimrl.config.schema.agent import PAST, POLICY, AgentConfig, PlayerConfig
from slimrl.data.prompt import Prompt

PLAYERS = "players"
"""Key of a prompt's metadata: an object of names by role"""


class Player(Protocol):
    """Says a role's next turn; in a thread if it is not asynchronous. A class may have `start` and `close`, both `async
    def`, for what it keeps."""

    def __call__(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]], seed: int
    ) -> str | Message | Awaitable[str | Message]:
        """The turn as a text, or as a message of the assistant with `content` and `tool_calls` in OpenAI's form.

        Args:
            messages: the role's whole conversation.
            tools: JSON schemas of its tools.
            seed: of this turn; all randomness comes from it.
        """
        ...


def player_of(role: str, prompt: Prompt, agent: AgentConfig) -> str:
    """Name of the player of a role, empty for the policy: the prompt's metadata says it in `players`, an object of
    names by role, or else the recipe's `agent.roles`.

    Raises:
        EnvironmentFailure: the metadata has something else there.
    """
    if not role:
        return ""
    settings, named = agent.roles.get(role), prompt.metadata.get(PLAYERS, {})
    if not isinstance(named, dict):
        raise EnvironmentFailure(f"{prompt.prompt_id}: metadata.{PLAYERS} is {named!r}, not an object of names by role")
    name = named.get(role, settings.player if settings is not None else POLICY)
    return "" if name == POLICY else str(name)


def refuse_unknown_players(prompts: Sequence[Prompt], agent: AgentConfig, roles: Sequence[str]) -> list[str]:
    """`file:line: problem` of each prompt whose metadata names players or roles that there are not.

    Args:
        roles: those that the environment's class says it has; none if it does not say.
    """
    known, problems = agent.player_names, []
    # An evaluation without `--past` says what is missing itself.
    others = () if len(known) > 1 else (PAST,)
    for prompt in prompts if len(known) > 1 or roles else ():
        named = prompt.metadata.get(PLAYERS, {})
        if not isinstance(named, dict):
            problems.append(f"{prompt.source}: metadata.{PLAYERS} is {named!r}, not an object of players by role")
            continue
        for role, name in named.items():
            if roles and role not in roles:
                problems.append(
                    f"{prompt.source}: metadata.{PLAYERS}.{role}: {agent.environment} has no role {role}; it has "
                    f"{', '.join(roles)}.{suggestion(role, roles)}"
                )
            if name not in (*known, *others):
                meant = suggestion(str(name), known)
                problems.append(
                    f"{prompt.source}: metadata.{PLAYERS}.{role} is {name!r}; there are {', '.join(known)}.{meant}"
                )
    return problems


def plays_past(prompts: Iterable[Prompt], agent: AgentConfig) -> bool:
    """Whether an older version of the policy plays a role in episodes of these prompts."""
    named = (prompt.metadata.get(PLAYERS, {}).values() for prompt in prompts)
    return PAST in chain((role.player for role in agent.roles.values()), *named)


def load_players(settings: Mapping[str, PlayerConfig]) -> dict[str, Player]:
    """Raises ValueError: names the player whose function or class cannot be called, or made, with its `args`."""
    found = {}
    for name, one in settings.items():
        try:
            found[name] = _load(one)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def _load(settings: PlayerConfig) -> Player:
    target: Any = resolve(settings.function, classes=True)
    if not isinstance(target, type):
        if settings.args:
            raise ValueError(f"{settings.function}: `args` are those of a class, and this is a function")
        return target
    try:
        return target(**settings.args)
    except TypeError as error:
        raise ValueError(f"{settings.function}: {error}") from error
