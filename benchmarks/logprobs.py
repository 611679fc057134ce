"""Memory and time of chunked log-probs against plain torch, forward and backward, in turn in one process.

Plain torch is the direct version: all logits in float32, log_softmax, gather, and autograd. Ours also gives the entropy
of each token. Logits are bfloat16, on one rank. Log-probs and gradients of both are asserted to agree.
Extra memory is the peak beyond the logits and their gradient, which both have: of the allocator on a GPU, of the
process on a CPU. On a CPU seconds are wall time; CPU time, on which other load has less effect, is measured too.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import make_table, write_figures
from rich.console import Console
from torch import Tensor

from slimrl.trainer.vocab_parallel import vocab_parallel_logprobs

QWEN3_VOCAB = 151_936
LIMITS = {"memory": 1 / 8, "seconds": 1.1}
"""Largest ratios to plain torch, at the default sizes."""


def plain_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return logits_TV.float().log_softmax(-1).gather(1, targets_T[:, None]).squeeze(1)


def chunked_logprobs(logits_TV: Tensor, targets_T: Tensor, chunk_tokens: int) -> Tensor:
    return vocab_parallel_logprobs(
        logits_TV, targets_T, temperature=1.0, vocab_size=logits_TV.shape[1], chunk_tokens=chunk_tokens
    )[0]


def make(tokens: int, vocab: int, device: str) -> tuple[Tensor, Tensor]:
    """Logits of which a few are likely, as a trained model's, and targets."""
    generator = torch.Generator().manual_seed(0)
    # Row by row, without a float32 copy of all.
    logits_TV = torch.empty((tokens, vocab), dtype=torch.bfloat16)
    for row_V in logits_TV:
        row_V.copy_(torch.randn(vocab, generator=generator) * 3)
    return logits_TV.to(device), torch.randint(0, vocab, (tokens,), generator=generator).to(device)


class PeakMemory:
    """The most memory that was in use since `start`, beyond that at the start."""

    def __init__(self, device: str) -> None:
        self.on_gpu, self.before = device == "cuda", 0

    def start(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            # Free memory that malloc keeps would hide what is taken out of it.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._resident("VmRSS")

    def extra_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else self._resident("VmHWM")
        return peak - self.before

    @staticmethod
    def _resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def measure(function: Callable[[Tensor], Tensor], logits_TV: Tensor, device: str) -> tuple[dict[str, float], Tensor]:
    """Figures of one forward and backward pass, and the log-probs; the gradient stays in `logits_TV.grad`."""
    logits_TV.grad = None
    memory = PeakMemory(device)
    memory.start()
    start, cpu_start = time.perf_counter(), time.process_time()
    logprobs_T = function(logits_TV)
    logprobs_T.sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    figures = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "extra_bytes": float(memory.extra_bytes() - logits_TV.numel() * logits_TV.element_size()),
    }
    return figures, logprobs_T.detach()


def compare(tokens: int, vocab: int, chunk_tokens: int, repeats: int, device: str) -> dict[str, dict[str, float]]:
    """Way -> medians over the repeats, and their ratios."""
    logits_TV, targets_T = make(tokens, vocab, device)
    logits_TV.requires_grad_()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "chunked": lambda logits_TV: chunked_logprobs(logits_TV, targets_T, chunk_tokens),
        "plain": lambda logits_TV: plain_logprobs(logits_TV, targets_T),
    }
    assert_equal(ways, logits_TV, device)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, function in ways.items():
            runs[name].append(measure(function, logits_TV, device)[0])
    figures = {
        name: {key: statistics.median(run[key] for run in each) for key in each[0]} for name, each in runs.items()
    }
    figures["ratio"] = {key: value / figures["plain"][key] for key, value in figures["chunked"].items()}
    return figures


def assert_equal(ways: dict[str, Callable[[Tensor], Tensor]], logits_TV: Tensor, device: str) -> None:
    """The first run of each, which is not counted."""
    logprobs_T, grad_TV = measure(ways["chunked"], logits_TV, device)[1], logits_TV.grad
    theirs_T = measure(ways["plain"], logits_TV, device)[1]
    torch.testing.assert_close(logprobs_T, theirs_T, rtol=1e-5, atol=1e-5)
    assert grad_TV is not None
    assert logits_TV.grad is not None
    # Some tokens: a difference of all would take as much memory as what is compared.
    torch.testing.assert_close(grad_TV[:4], logits_TV.grad[:4], rtol=1e-2, atol=1e-6)


def print_table(figures: dict[str, dict[str, float]], title: str) -> None:
    table = make_table(title, ("", "seconds", "CPU seconds", "extra MB"))
    for name in ("chunked", "plain"):
        row = figures[name]
        table.add_row(name, f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}", f"{row['extra_bytes'] / 1e6:.0f}")
    ratio = figures["ratio"]
    table.add_row("ratio", *(f"{ratio[key]:.3f}" for key in ("seconds", "cpu_seconds", "extra_bytes")))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of the micro-batch")
    parser.add_argument("--vocab", type=int, default=QWEN3_VOCAB, help="rows of the output layer; by default Qwen3's")
    parser.add_argument("--chunk-tokens", type=int, default=32, help="trainer.logprob_chunk_tokens")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    sizes = (options.tokens, options.vocab, options.chunk_tokens, options.repeats)
    if min(*sizes, options.threads) < 1:
        print("--tokens, --vocab, --chunk-tokens, --repeats and --threads: at least 1.", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = compare(*sizes, device)
    title = f"{options.tokens} tokens, {options.vocab} rows, chunks of {options.chunk_tokens}, on {device}"
    print_table(figures, title)
    write_figures(
        options.json,
        {
            "device": device,
            "threads": options.threads,
            "tokens": options.tokens,
            "vocab": options.vocab,
            "chunk_tokens": options.chunk_tokens,
            "repeats": options.repeats,
            "limits": LIMITS,
            "ways": figures,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
