"""Sixty mistakes that are easily made, each as the files and the command with which it is made.

All of them begin with a task that is right: `clock.yaml`, `clock.py`, `clock.jsonl`, beside the repository's `recipes/`
and a toy in `model/`.
"""

from dataclasses import dataclass, field

CHECK = "config check clock.yaml"
TRAIN = "train clock.yaml"
A3B, A22B = (f"config check recipes/qwen3_moe/{name}_gspo.yaml" for name in ("qwen3_30b_a3b", "qwen3_235b_a22b"))

TOOL = '''def minutes(time: str) -> int:
    """Minutes since midnight.

    Args:
        time: A time of day such as 09:40.
    """
    return 60 * int(time[:2]) + int(time[3:])
'''
REWARD = """def reward(trajectory, prompt):
    return float(trajectory.messages[-1]["content"] == str(prompt.label))
"""
RECIPE = """extends: recipes/tiny_moe/gspo_calculator.yaml
run: {name: clock, dir: runs}
model: {path: model}
agent: {tools: ["clock:minutes"]}
reward: {function: "clock:reward"}
data: {train: clock.jsonl, eval: {heldout: clock.jsonl}}
"""
DATA = '{"prompt": "How many minutes are there from 09:40 to 13:05?", "label": 205}\n'
FILES = {"clock.yaml": RECIPE, "clock.py": f"{TOOL}\n\n{REWARD}", "clock.jsonl": DATA}
"""By their names; a mistake replaces some of them."""

REWARD_LINE = 'reward: {function: "clock:reward"}'
JUDGE = "slimrl.rewards.judge:Judge"
JUDGE_ARGS = '{url: "http://127.0.0.1:9/v1", model: judge, rubric: short, api_key_env: JUDGE_KEY}'
ARGS = {"url": "http://127.0.0.1:9/v1", "model": "judge", "rubric": "It is short.", "retries": 0}


@dataclass(frozen=True, kw_only=True)
class Mistake:
    what: str
    """In words"""
    command: str = CHECK
    """What is called, without `slimrl`"""
    files: dict[str, str] = field(default_factory=dict)
    """Those of FILES that are otherwise"""
    environment: dict[str, str] = field(default_factory=dict)
    shown: str = ""
    """What is wrong in the files"""
    judge: str | None = None
    """What the judge of `reward.function` answers when it is asked for a verdict; empty if nobody listens"""


def with_tool(what: str, tool: str, command: str = CHECK) -> Mistake:
    return Mistake(what=what, command=command, files={"clock.py": f"{tool}\n\n{REWARD}"}, shown=tool)


def with_reward(what: str, reward: str, command: str = CHECK) -> Mistake:
    return Mistake(what=what, command=command, files={"clock.py": f"{TOOL}\n\n{reward}"}, shown=reward)


def with_recipe(what: str, old: str, new: str, command: str = CHECK) -> Mistake:
    assert old in RECIPE
    return Mistake(what=what, command=command, files={"clock.yaml": RECIPE.replace(old, new)}, shown=new)


def with_data(what: str, lines: str, *settings: str) -> Mistake:
    return Mistake(what=what, command=" ".join([TRAIN, *settings]), files={"clock.jsonl": lines}, shown=lines)


def setting(what: str, *given: str, recipe: str = CHECK) -> Mistake:
    return Mistake(what=what, command=" ".join([recipe, *given]))


def part(function: str, args: str) -> str:
    return f'reward: {{function: "", parts: {{part: {{function: "{function}", args: {args}}}}}}}'


def _without(text: str, *parts: str) -> str:
    for part in parts:
        assert part in text
        text = text.replace(part, "")
    return text


SETTINGS = [
    setting("A key is misspelt", "algorithm.clip_hgih=4e-4", recipe=A3B),
    setting("A setting has the name that slime gives it", "algorithm.eps_clip=0.2"),
    setting("A setting has the name that verl gives it", "actor_rollout_ref.rollout.n=8"),
    setting("A setting's name is guessed", "trainer.global_batch_size=256"),
    setting("Parallelism in short words", "trainer.tp=2", "rollout.tp=2"),
    setting("A field of SGLang stands in the wrong section", "rollout.mem_fraction_static=0.6"),
    setting("A field of SGLang has another name", "rollout.sglang.mem_fraction=0.6", recipe=A3B),
    setting("A field that slimrl sets", "rollout.sglang.tp_size=8"),
    setting("Engines in FP8 by a field of SGLang", "rollout.sglang.quantization=fp8"),
    setting("A choice in capitals", "algorithm.name=GRPO"),
    setting("A word for a boolean", "deterministic=yes"),
    setting("A value for a section", "algorithm=grpo"),
    setting("A list without brackets", "agent.tools=clock:minutes"),
    setting("Experts do not divide over the ranks", "trainer.num_ranks=12", "trainer.parallel.expert=12", recipe=A3B),
    setting("Tensor parallelism of a MoE without sequence parallelism", "trainer.parallel.sequence=false", recipe=A3B),
    setting(
        "Layers do not divide over the stages",
        "trainer.megatron.num_layers_in_last_pipeline_stage=24",
        recipe=A22B,
    ),
    setting("A trajectory is longer than the token budget", "trainer.max_tokens_per_rank=4096", recipe=A3B),
    setting("Advantages within a group of one", "rollout.samples_per_prompt=1", recipe=A3B),
    setting("Shared GPUs, and a transport that needs others", "resync.transport=p2p", recipe=A3B),
    setting("An engine's ranks do not divide the heads", "rollout.engine_tp=6", "rollout.engine_ep=6", recipe=A3B),
    setting("PPO's clip range with GSPO's ratios", "algorithm.clip_low=0.2", "algorithm.clip_high=0.28", recipe=A3B),
]

YAML = [
    with_recipe("A tab", "run: {name: clock, dir: runs}", "run:\n\tname: clock"),
    with_recipe("Two keys on a line", "run: {name: clock, dir: runs}", "run: name: clock"),
    with_recipe("No space behind a colon", "model: {path: model}", "steps:3\nmodel: {path: model}"),
    with_recipe("A list that is not closed", '["clock:minutes"]', '["clock:minutes"'),
    with_recipe(
        "Keys of a section that do not line up", "run: {name: clock, dir: runs}", "run:\n    name: clock\n  dir: x"
    ),
    with_recipe("A key twice", "model: {path: model}", "model: {path: model}\nrun: {dir: elsewhere}"),
    with_recipe("The base is looked for in the working directory's parent", "extends: recipes", "extends: ../recipes"),
    with_recipe("Values that must be given", "recipes/tiny_moe/gspo_calculator.yaml", "recipes/base/gspo.yaml"),
]

TOOLS = [
    setting("A file in place of a module", "agent.tools=[clock.py:minutes]"),
    setting("A dot in place of the colon", "agent.tools=[clock.minutes]"),
    setting("A function that the module does not have", "agent.tools=[clock:minute]"),
    setting("The same tool twice", "agent.tools=[clock:minutes,clock:minutes]"),
    with_tool("A tool without annotations", TOOL.replace("time: str", "time")),
    with_tool("A tool without a docstring", _without(TOOL, TOOL[TOOL.index('    """') : TOOL.index("    return")])),
    with_tool(
        "A parameter that the docstring leaves out",
        _without(TOOL, "    Args:\n        time: A time of day such as 09:40.\n"),
    ),
    with_tool("A tool with **kwargs", TOOL.replace("time: str", "**time: str")),
    with_tool("A class as a tool", "class minutes:\n    pass\n"),
    with_tool("A number as a tool", "minutes = 60\n"),
    with_tool("A tool that returns bytes", TOOL.replace("-> int", "-> bytes"), TRAIN),
    Mistake(what="An argument that no tool has", command=f"{TRAIN} agent.tool_args.zone=UTC"),
    with_tool("A module that is not Python", TOOL.replace("-> int:", "-> int")),
]

REWARDS = [
    with_reward("A reward of one argument", "def reward(trajectory):\n    return 1.0\n"),
    with_reward("A reward whose objects cannot be called", "class reward:\n    pass\n"),
    with_recipe("An argument that a reward does not take", REWARD_LINE, part("clock:reward", "{strict: true}")),
    setting("Two rewards", "reward.parts.clock.function=clock:reward"),
    with_recipe("A key of a judge that the environment does not have", REWARD_LINE, part(JUDGE, JUDGE_ARGS), TRAIN),
    Mistake(what="A judge that nobody serves", judge=""),
    Mistake(what="A judge that gives no verdict", judge="I would give it seven points."),
]

DATA_LINES = [
    with_data("Lines without a label", '{"prompt": "How many?"}\n' * 3),
    with_data("Lines that are not JSON", "{'prompt': 'How many?', 'label': 205}\n"),
    with_data("Columns of other names", '{"question": "How many?", "answer": 205}\n'),
    with_data(
        "A conversation file for train",
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n',
    ),
    setting("Data that is not there", "data.train=clocks.jsonl", "--files"),
]

RUNS = [
    setting("A model that is not there", "model.path=models/Qwen3-30B-A3b"),
    setting("A variable that is not set", "model.path=${oc.env:SLIMRL_MODEL}"),
    Mistake(what="A recipe that is not there", command="config check clok.yaml"),
    Mistake(what="wandb without a key", command=f"{CHECK} tracking.wandb=online"),
    Mistake(
        what="A job of too few nodes",
        command="launch slurm recipes/qwen3_moe/qwen3_235b_a22b_gspo.yaml --nodes 1 --dry-run",
    ),
    Mistake(what="An output below a folder that is not there", command="-tools quantize model mnt/dsik/model-fp8"),
]
SECTIONS = {
    "Settings": SETTINGS,
    "YAML": YAML,
    "Tools": TOOLS,
    "Rewards and judges": REWARDS,
    "Data": DATA_LINES,
    "Models, files, clusters": RUNS,
}
