"""`slimrl-tools synthesize`."""

from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import Seed, count
from slimrl_tools.exit_codes import exit_codes

app = typer.Typer(
    no_args_is_help=True, help="Questions from a graph of facts, and tasks from calls of tools (docs/synthesis.md)."
)

ALL_KINDS = "chain,intersection,union,negation,projection"


@app.command()
def graph(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for graph.jsonl and phrases.jsonl.")],
    facts: Annotated[int, typer.Option(min=500, help="Facts of the graph.")] = 5000,
    seed: Seed = 0,
) -> None:
    """Write an example graph: made-up people, companies, towns, schools and books."""
    from slimrl_tools.synthesis.example import write_example

    with exit_codes():
        write_example(out, seed=seed, num_facts=facts)
        typer.echo(f"{out}: {facts} facts")


@app.command()
def questions(
    graph: Annotated[
        Path,
        typer.Argument(metavar="GRAPH", help='JSONL of {"subject", "relation", "object"}, with "text" or without.'),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for prompts, conversations and the corpus.")],
    phrases: Annotated[Path | None, typer.Option(help="JSONL of how questions say the relations.")] = None,
    kinds: Annotated[
        str, typer.Option(help="Kinds of questions, in equal parts, with commas between them.")
    ] = ALL_KINDS,
    depth: Annotated[int, count("Most hops from a name to the answer; all depths up to it in equal parts.")] = 3,
    num: Annotated[int, count("Questions to train on.")] = 1000,
    heldout: Annotated[int, count("Questions to evaluate on.")] = 100,
    conversations: Annotated[
        int, typer.Option(min=0, help="Questions to train on of which sft.jsonl gets a demonstration.")
    ] = 500,
    rewrite_url: Annotated[
        str, typer.Option(help="OpenAI-compatible API, up to /v1, that says the questions in other words.")
    ] = "",
    rewrite_model: Annotated[str, typer.Option(help="The API's name of the model.")] = "",
    rewrite_key_env: Annotated[str, typer.Option(help="Environment variable with the API's key.")] = "",
    seed: Seed = 0,
) -> None:
    """Write questions whose answers follow from a graph of facts, each with its proof, verified by a second solver.

    \b
    Example:
      slimrl-tools synthesize graph data/graph
      slimrl-tools synthesize questions data/graph/graph.jsonl data/questions --phrases data/graph/phrases.jsonl
    """
    from slimrl_tools.synthesis.rewriting import Rewriter
    from slimrl_tools.synthesis.synthesis import Wanted, synthesize

    with exit_codes():
        if bool(rewrite_url) != bool(rewrite_model):
            raise ValueError("--rewrite-url and --rewrite-model: both are needed, or none")
        wanted = Wanted(
            num=num, heldout=heldout, conversations=conversations, kinds=kinds.split(","), depth=depth, seed=seed
        )
        rewriter = Rewriter(rewrite_url, rewrite_model, rewrite_key_env) if rewrite_url else None
        made = synthesize(graph, phrases, out, wanted, rewriter)
        left_out = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in made["left_out"].items())
        typer.echo(
            f"{out}: {num} + {heldout} questions, {made['verified']} verified, {made['rewritten']} rewritten, "
            f"{made['conversations']} conversations\nleft out: {left_out}"
        )


@app.command()
def hindsight(
    trajectories: Annotated[
        Path, typer.Argument(metavar="TRAJECTORIES", help="JSONL of trajectories of an agent that searches the corpus.")
    ],
    graph: Annotated[Path, typer.Argument(metavar="GRAPH", help="The graph of which the corpus was made.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for prompts and conversations.")],
    phrases: Annotated[Path | None, typer.Option(help="JSONL of how questions say the relations.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the questions, with which the same entities are held out.")] = 0,
) -> None:
    """Tell trajectories again as the solutions of what their searches did find, whatever was asked."""
    from slimrl_tools.synthesis.hindsight import hindsight as tell_again

    with exit_codes():
        made = tell_again(trajectories, graph, phrases, out, seed)
        typer.echo(f"{out}: {made['questions']} questions of {made['trajectories']['number']} trajectories")


@app.command()
def forward(
    tools: Annotated[
        str,
        typer.Argument(metavar="TOOLS", help="A recipe with agent.tools, or import paths with commas between them."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for prompts and conversations.")],
    steps: Annotated[Path | None, typer.Option(help="JSONL of how tools are called at random, and in words.")] = None,
    plan_url: Annotated[str, typer.Option(help="OpenAI-compatible API, up to /v1, that proposes plans.")] = "",
    plan_model: Annotated[str, typer.Option(help="The API's name of the model.")] = "",
    plan_key_env: Annotated[str, typer.Option(help="Environment variable with the API's key.")] = "",
    tool_args: Annotated[str, typer.Option(help="JSON object of arguments that the policy does not give.")] = "{}",
    depth: Annotated[int, count("Most calls of a plan; all numbers up to it in equal parts.")] = 3,
    num: Annotated[int, count("Tasks to train on.")] = 1000,
    heldout: Annotated[int, count("Tasks to evaluate on.")] = 100,
    conversations: Annotated[
        int, typer.Option(min=0, help="Tasks to train on whose calls sft.jsonl has as demonstrations.")
    ] = 500,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Deadline of a call, in seconds.")] = 30.0,
    seed: Seed = 0,
) -> None:
    """Plan calls of tools, make them, and write tasks whose answers are what came out.

    \b
    Example:
      slimrl-tools synthesize forward slimrl.agent.calculator:calculator data/forward --steps steps.jsonl
    """
    from slimrl_tools.synthesis.forward.forward import Source, synthesize_forward

    with exit_codes():
        source = Source(steps=steps, url=plan_url, model=plan_model, key_env=plan_key_env)
        made = synthesize_forward(
            tools, out, source, tool_args=tool_args, num=num, heldout=heldout, conversations=conversations,
            depth=depth, timeout_s=timeout_s, seed=seed,
        )  # fmt: skip
        left_out = ", ".join(f"{number} {reason}" for reason, number in made["left_out"].items())
        typer.echo(
            f"{out}: {num} + {heldout} tasks, {made['conversations']} conversations\nleft out: {left_out or 'none'}"
        )
