"""`slimrl-tools inspect`: describes a checkpoint in tables or as JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from slimrl_tools.command_options import Json
from slimrl_tools.exit_codes import exit_codes
from slimrl_tools.terminal import make_console, make_table

from slimrl.observability.logs import quiet_megatron
from slimrl.observability.units import show_bytes, show_count


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A checkpoint in any format, a folder with config.json, or a published model."
        ),
    ],
    as_json: Json = False,
    hf: Annotated[
        Path | None, typer.Option(help="Folder with config.json, for a torch_dist checkpoint without one.")
    ] = None,
) -> None:
    """Describe a checkpoint: architecture, parameters in total and active per token, dtypes, files, layout.

    Reads headers alone. Formats: Hugging Face folders, plain or in block FP8; torch_dist folders; a run's checkpoints.

    \b
    Examples:
      slimrl-tools inspect Qwen/Qwen3-30B-A3B
      slimrl-tools inspect runs/quickstart/gspo/export/hf
      slimrl-tools inspect runs/quickstart/gspo/checkpoints/step_000012 --json
    """
    with exit_codes():
        quiet_megatron()
        from slimrl_tools.inspect.inspection import inspect_checkpoint

        facts = inspect_checkpoint(path, hf)
        if as_json:
            typer.echo(json.dumps(facts, indent=2))
        else:
            make_console().print(_tables(facts))


def _tables(facts: dict[str, Any]) -> Group:
    parts: list[Table | str] = [_facts(_headline(facts))]
    if facts["architecture"]:
        parts += ["", _facts(facts["architecture"])]
    if facts["parameters"]:
        parts += ["", _parameters(facts["parameters"])]
    if "storage" in facts:
        parts += ["", _element_types(facts["storage"])]
    return Group(*parts, *_problems(facts["tensors"]))


def _headline(facts: dict[str, Any]) -> dict[str, Any]:
    lines = {"path": facts["path"], "format": facts["format"]}
    if "config" in facts:
        lines["config"] = facts["config"]
    if facts.get("model_type"):
        lines["model_type"] = facts["model_type"]
    lines["family"] = facts["family"] or facts["reason"]
    if wrapper := facts.get("wrapper"):
        counted = wrapper["other_tensors"]
        others = "" if counted is None else f", with {counted} tensors of other modalities"
        lines["wrapped in"] = f"{wrapper['model_type']}{others}"
    if facts.get("quantisation"):
        config = facts["quantisation"]
        tiles = config.get("weight_block_size")
        named = (config.get("quant_method"), f"tiles {tiles}" if tiles else config.get("format"))
        lines["quantisation"] = ", ".join(filter(None, named))
    if "storage" in facts:
        lines["files"] = f"{facts['storage']['files']}, {show_bytes(facts['storage']['bytes_on_disk'])}"
    if "torch_dist" in facts:
        stored = facts["torch_dist"]
        lines["saved under"] = _layout(stored["saved_under"])
        lines["optimizer state"] = show_bytes(stored["optimizer_bytes"]) if stored["optimizer_bytes"] else "none"
    return lines


def _layout(layout: dict[str, int] | None) -> str:
    """The sizes above 1."""
    if layout is None:
        return "unknown"
    return ", ".join(f"{name} {size}" for name, size in layout.items() if size > 1) or "one rank"


def _facts(facts: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def _parameters(parameters: dict[str, Any]) -> Table:
    table = make_table("parameters", "total", "active per token", right=("total", "active per token"))
    for name, count in parameters["parts"].items():
        if name != "MTP":
            table.add_row(name, show_count(count["total"]), show_count(count["active"]))
    table.add_row("all", show_count(parameters["total"]), show_count(parameters["active"]), style="bold")
    if parameters["mtp"]:
        table.add_row("MTP layers, not in all", show_count(parameters["mtp"]))
    return table


def _element_types(storage: dict[str, Any]) -> Table:
    table = make_table("stored as", "tensors", "size", right=("tensors", "size"))
    for dtype, held in storage["dtypes"].items():
        table.add_row(dtype, f"{held['tensors']:,}", show_bytes(held["bytes"]))
    return table


def _problems(tensors: dict[str, Any] | None) -> list[str]:
    """Lines on tensors that do not match config.json."""
    if tensors is None:
        return []
    lines = []
    for kind in ("missing", "unknown", "misshaped", "left out"):
        held = tensors[kind]
        if held["count"]:
            more = ", ..." if held["count"] > len(held["first"]) else ""
            lines.append(f"{held['count']} tensors are {kind}: {', '.join(held['first'])}{more}")
    lines += [tensors["hint"]] if tensors["hint"] else []
    return ["", *lines] if lines else []
