"""The `slimrl-tools` command. Exit codes: 0 done, 2 input refused, 1 failed.

A command imports its modules when it runs, so that help and refusals come at once.
"""

from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import Seed, count
from slimrl_tools.convert.commands_convert import app as convert
from slimrl_tools.derive.commands_derive import average, dequantize, quantize, slice_layers
from slimrl_tools.environment.commands_environment import app as environment
from slimrl_tools.exit_codes import exit_codes
from slimrl_tools.inspect.commands_diff_config import diff_config
from slimrl_tools.inspect.commands_inspect import inspect
from slimrl_tools.prepare.commands_prepare import prepare
from slimrl_tools.search.commands_search import search_data, search_index
from slimrl_tools.synthesis.commands_synthesize import app as synthesize
from slimrl_tools.toy.commands_data import add_data_commands
from slimrl_tools.toy.toy_configs import ALL_TOYS, ToySize, toy_config
from slimrl_tools.verify.commands_verify import verify

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__.split("\n")[0]
)

app.add_typer(convert, name="convert")
app.add_typer(environment, name="environment")
app.add_typer(synthesize, name="synthesize")
for command in (verify, inspect, quantize, dequantize, average, slice_layers, diff_config, prepare):
    app.command()(command)
add_data_commands(app)
for command in (search_data, search_index):
    app.command()(command)


@app.command()
def toy(
    family: Annotated[str, typer.Argument(help=f"One of {', '.join(ALL_TOYS)}.")],
    out: Annotated[Path, typer.Argument(help="New folder for the checkpoint.")],
    seed: Seed = 0,
    layers: Annotated[int, count("Layers.")] = ToySize.layers,
    hidden: Annotated[int, count("Width of the model.")] = ToySize.hidden,
    heads: Annotated[int, count("Heads of attention.")] = ToySize.heads,
    kv_heads: Annotated[int, count("Heads of keys and values; they divide --heads.")] = ToySize.kv_heads,
    head_dim: Annotated[int, count("Width of a head.")] = ToySize.head_dim,
    experts: Annotated[int, count("Experts of a layer.")] = ToySize.experts,
    experts_per_token: Annotated[int, count("Experts to which a token goes.")] = ToySize.experts_per_token,
    moe_intermediate: Annotated[int, typer.Option(min=1, help="Width of one expert.")] = ToySize.moe_intermediate,
    mtp_layers: Annotated[int, typer.Option(min=0, help="Layers for multi-token prediction.")] = ToySize.mtp_layers,
    max_position: Annotated[int, count("Longest context in tokens.")] = ToySize.max_position,
    text: Annotated[Path | None, typer.Option(help="File of a task whose words become tokens.")] = None,
) -> None:
    """Write a small random checkpoint with tokenizer and chat template."""
    size = ToySize(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        experts=experts,
        experts_per_token=experts_per_token,
        moe_intermediate=moe_intermediate,
        mtp_layers=mtp_layers,
        max_position=max_position,
    )
    with exit_codes():
        toy_config(family, size)  # refuses what it cannot build, before the seconds of the import
        from slimrl_tools.toy.toy import write_toy

        parameters = write_toy(family, out, size, seed, text)
        typer.echo(f"{out}: {family}, {parameters / 1e6:.2f} million parameters")


if __name__ == "__main__":
    app()
