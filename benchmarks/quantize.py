"""Gigabytes per second of the block FP8 quantiser and of a version in plain torch, in turn in one process.

Plain torch is the direct version: the whole matrix in float32, padded to whole tiles and divided by its scales; to
dequantise, the codes are converted and multiplied. Both results are asserted to be equal bit for bit.
Bytes are those of the bfloat16 matrix. On a GPU the rate is also compared with a copy of the matrix, which reads and
writes each byte once.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import make_table, write_figures
from rich.console import Console
from torch import Tensor
from torch.nn.functional import pad

from slimrl.quantization.fp8 import dequantize, quantize

SHAPES = {
    "expert of Qwen3-30B-A3B": (768, 2048),
    "expert of DeepSeek-V3": (2048, 7168),
    "MLP of DeepSeek-V3": (18432, 7168),
}
TILE = 128


def plain_quantize(weight_MN: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight_MN.shape
    padded = pad(weight_MN.float(), (0, -columns % TILE, 0, -rows % TILE))
    tiles = padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE)
    scale = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-10) / 448.0
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return codes[:rows, :columns].contiguous(), scale


def plain_dequantize(codes_MN: Tensor, scale: Tensor) -> Tensor:
    rows, columns = codes_MN.shape
    whole = scale.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
    return (codes_MN.float() * whole).to(torch.bfloat16)


def seconds(function: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(shape: tuple[int, int], repeats: int, device: str) -> dict[str, dict[str, float]]:
    """Direction -> GB/s of both and their ratio, medians over the repeats."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).to(device)
    codes, scale = quantize(weight)
    theirs = plain_quantize(weight)
    assert torch.equal(codes.view(torch.uint8), theirs[0].view(torch.uint8)), "the codes differ"
    assert torch.equal(scale, theirs[1]), "the scales differ"
    back = dequantize(codes, scale, torch.bfloat16)
    assert torch.equal(back, plain_dequantize(codes, scale)), "the dequantised weights differ"
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "quantize": (lambda: quantize(weight), lambda: plain_quantize(weight)),
        "dequantize": (lambda: dequantize(codes, scale, torch.bfloat16), lambda: plain_dequantize(codes, scale)),
    }
    gigabytes = weight.numel() * 2 / 1e9
    figures: dict[str, dict[str, float]] = {}
    for name, (ours, plain) in ways.items():
        pairs = [(seconds(ours, device), seconds(plain, device)) for _ in range(repeats)]
        our_s, plain_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        figures[name] = {
            "gb_per_s": gigabytes / our_s,
            "plain_gb_per_s": gigabytes / plain_s,
            "ratio": plain_s / our_s,
        }
    if device == "cuda":
        other = torch.empty_like(weight)
        copy_s = statistics.median(seconds(lambda: other.copy_(weight), device) for _ in range(repeats))
        for row in figures.values():
            row["copy_gb_per_s"] = gigabytes / copy_s
    return figures


def print_table(cases: dict[str, dict[str, dict[str, float]]], device: str) -> None:
    title = f"block FP8 on {device}, {torch.get_num_threads()} threads"
    table = make_table(title, ("matrix", "direction", "GB/s", "plain torch GB/s", "ratio", "copy GB/s"), labels=2)
    for case, ways in cases.items():
        for way, row in ways.items():
            copy = f"{row['copy_gb_per_s']:.1f}" if "copy_gb_per_s" in row else "-"
            figures = (f"{row['gb_per_s']:.2f}", f"{row['plain_gb_per_s']:.2f}", f"{row['ratio']:.2f}", copy)
            table.add_row(case, way, *figures)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each")
    parser.add_argument("--matrix", choices=SHAPES, nargs="+", default=list(SHAPES), help="those to measure")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1:
        print("--repeats and --threads: at least 1.", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {name: SHAPES[name] for name in options.matrix}
    cases = {f"{name} {list(shape)}": compare(shape, options.repeats, device) for name, shape in shapes.items()}
    print_table(cases, device)
    report = {"device": device, "threads": options.threads, "repeats": options.repeats, "cases": cases}
    write_figures(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
