"""Data to train on and to evaluate on."""

from dataclasses import dataclass, field
from enum import Enum

from slimrl.config.schema.types import (
    MISSING,
    FileName,
    FilePath,
    Flag,
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)


class TruncationMode(str, Enum):
    score = "score"
    """A truncated trajectory is rewarded like any other."""
    zero = "zero"
    """A truncated trajectory is trained on with reward 0, or with its own reward if that is below 0."""
    mask = "mask"
    """A truncated trajectory counts in its group's baseline, but its own tokens are not trained on."""


@dataclass(kw_only=True)
class CurriculumConfig:
    """Training files of rising difficulty (docs/data_formats.md#a-curriculum)."""

    levels: dict[FileName, list[str]] = field(default_factory=dict)
    """By a name of your own, files of a task, the easiest first: `train` and names of `data.more`. Empty for no
    curriculum."""
    raise_at: PositiveFraction = 0.8
    """Success rate at which the next file begins: the mean over groups of the fraction of their trajectories with
    `eval.pass_reward` or more."""
    lower_at: Fraction | None = None
    """Success rate at which the file before begins again, less than `raise_at`; null for never."""
    window: PositiveInt = 64
    """Groups of the present file over which the rate is measured, and the least that it takes."""
    passed_weight: NonNegativeFloat = 0.2
    """Factor of the weight of a passed file; 0 to train on the present one alone."""


@dataclass(kw_only=True)
class DataConfig:
    train: FilePath = MISSING
    """File of prompts (`slimrl train`) or of conversations (`slimrl sft`): Parquet if its name ends in `.parquet`, else
    JSONL, compressed if it ends in `.gz`."""
    eval: dict[FileName, FilePath] = field(default_factory=dict)
    """Evaluation sets: files like `train`, by name."""
    more: dict[FileName, FilePath] = field(default_factory=dict)
    """Further files to train on by name."""
    weights: dict[str, PositiveFloat] = field(default_factory=dict)
    """How much of the training is on each file: a number for `train` and for each name of `more`, of which only the
    proportions count. Empty to take each item of all files once per epoch."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    keys: dict[str, str] = field(default_factory=dict)
    """Columns of the files by our names: `{prompt: problem, label: answer}`; `a.b` is the key `b` of the column `a`.
    The columns that it does not name are the prompt's metadata. Empty for files with our names."""
    eval_keys: dict[str, str] = field(default_factory=dict)
    """Columns of the evaluation sets by our names, as `keys`; empty for `keys`."""
    shuffle: Flag = True
    """A new order each epoch, derived from the seed."""
    max_prompt_tokens: PositiveInt | None = None
    """Prompts longer than this, with tools and system prompt, are left out and counted. Null leaves none out: prompts
    without room for an answer are refused."""

    @property
    def train_files(self) -> dict[str, str]:
        """Files to train on by name, `train` first."""
        return {"train": self.train, **self.more}

    @staticmethod
    def train_key(name: str) -> str:
        """The setting that names a training file."""
        return "data.train" if name == "train" else f"data.more.{name}"

    @property
    def keys_of_eval(self) -> dict[str, str]:
        """Columns of the evaluation sets."""
        return self.eval_keys or self.keys


@dataclass(kw_only=True)
class EvalConfig:
    every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    at_start: Flag = True
    """Evaluate before the first step."""
    at_end: Flag = True
    """Evaluate after the last step."""
    engines: NonNegativeInt = 0
    """Engines that evaluate while the others sample and the trainer trains, with the weights that they have; 0 for all
    of them, between two steps. Needs `rollout.mode` `async` or `one_step_off`."""
    samples_per_prompt: PositiveInt = 1
    """Trajectories of each prompt; more than one needs a temperature above 0 in `rollout.eval_sampling`."""
    pass_at: list[PositiveInt] = field(default_factory=list)
    """Values of k for which pass@k is estimated, each at most `samples_per_prompt` (docs/evaluation.md)."""
    pass_reward: Float = 1.0
    """Smallest reward with which a trajectory passes."""


@dataclass(kw_only=True)
class SftConfig:
    batch_conversations: PositiveInt = 64
    """Conversations per optimizer update; one that the chat template rewrites as it goes on counts once for each of its
    sequences."""
    max_tokens: PositiveInt = MISSING
    """Maximum length; a longer conversation is refused with its line before training starts."""
    summary_every_steps: PositiveInt = 20
    """Updates between summary rows on the terminal; metrics.jsonl has every update."""
