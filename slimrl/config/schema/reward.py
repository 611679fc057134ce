"""The reward and its parts."""

from dataclasses import dataclass, field

from slimrl.config.schema.types import (
    MISSING,
    AlarmSteps,
    ExceptionPath,
    FiniteValue,
    Flag,
    Float,
    ImportPath,
    NonNegativeInt,
    OptionalImportPath,
    PositiveFloat,
)

RETRY_ON = ("builtins:OSError", "aiohttp:ClientConnectionError", "httpx:TransportError")
"""What a connection that fails raises in the clients that a reward is likely to use"""


@dataclass(kw_only=True)
class RewardPartConfig:
    """A named number that counts in the reward (docs/rewards.md): the settings of `reward.by_name.NAME` and
    `reward.group.NAME` too."""

    function: ImportPath = MISSING
    """Import path `module:name` of a function of a trajectory and its prompt, or of a class of such functions; in
    `group`, of the trajectories of a prompt and the prompt."""
    weight: Float = 1.0
    """Factor of the part in the reward; below 0 for a cost, 0 to log the part alone."""
    cap: PositiveFloat | None = None
    """Values beyond plus or minus this count as this; null for no cap."""
    args: dict[str, FiniteValue] = field(default_factory=dict)
    """Keyword arguments of the function, or of the class when it is made."""
    verified: Flag = False
    """The part is checked against the truth, such as a label or tests. The others are proxies, which
    `reward.alarm_steps` compares with it."""


@dataclass(kw_only=True)
class RewardConfig:
    function: OptionalImportPath = ""
    """Import path `module:name` of one reward: a function of a trajectory and its prompt, or a class of such functions
    (slimrl/rewards). Empty where `parts`, `by_name` or `group` have the reward."""
    parts: dict[str, RewardPartConfig] = field(default_factory=dict)
    """Parts of the reward of every trajectory: the reward is their weighted sum."""
    by_name: dict[str, RewardPartConfig] = field(default_factory=dict)
    """Further parts by name; a prompt has the one that its metadata names."""
    name_key: str = "reward"
    """Key of a prompt's metadata that names its part of `by_name`."""
    group: dict[str, RewardPartConfig] = field(default_factory=dict)
    """Parts that are computed for all trajectories of a prompt at once; not in evaluations."""
    group_filters: list[ImportPath] = field(default_factory=list)
    """Import paths of functions that decide, from the trajectories of a group, whether to keep it."""
    retries: NonNegativeInt = 0
    """How often a reward function that failed is called again, within the trajectory's deadline."""
    retry_on: list[ExceptionPath] = field(default_factory=lambda: list(RETRY_ON))
    """Import paths of the exceptions that count for `retries`; any other fails the trajectory at once."""
    startup_timeout_s: PositiveFloat = 120.0
    """Deadline for a reward with a method `start` to start, and for its `close`."""
    alarm_steps: AlarmSteps = 20
    """Steps over which reward/hacking_alarm looks for a proxy that rises while the verified parts fall; 0 is off."""
