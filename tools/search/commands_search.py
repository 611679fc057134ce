"""`slimrl-tools search-data` and `search-index`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import Seed, count
from slimrl_tools.exit_codes import exit_codes

NUM_CONVERSATIONS = 25600


def search_data(
    out: Annotated[Path, typer.Argument(help="New folder for corpus.jsonl, train.jsonl, heldout.jsonl and sft.jsonl.")],
    seed: Seed = 0,
    num_train: Annotated[int, count("Questions to train on.")] = 2048,
    num_heldout: Annotated[int, count("Questions to evaluate on.")] = 512,
    num_conversations: Annotated[
        int | None, typer.Option(min=1, help=f"Conversations of the cold start.  [default: {NUM_CONVERSATIONS}]")
    ] = None,
    passages: Annotated[
        int | None,
        count("Passages of a larger corpus, with questions of one to three facts, for a model that can call tools."),
    ] = None,
) -> None:
    """Write the search task: questions over a corpus of made-up facts, and conversations for the cold start.

    Without --passages the corpus is that of a toy, of 460 facts; with it, no conversations are written.
    """
    with exit_codes():
        if passages is None:
            from slimrl_tools.toy.search_data import write_search_data

            conversations = num_conversations or NUM_CONVERSATIONS
            write_search_data(
                out, seed=seed, num_train=num_train, num_heldout=num_heldout, num_conversations=conversations
            )
            typer.echo(f"{out}: {num_train} + {num_heldout} questions, {conversations} conversations")
            return
        if num_conversations is not None:
            raise ValueError("--num-conversations: conversations are of the toy's corpus; leave --passages out")
        from slimrl_tools.search.search_corpus import write_search_corpus

        write_search_corpus(out, seed=seed, num_passages=passages, num_train=num_train, num_heldout=num_heldout)
        typer.echo(f"{out}: {passages} passages, {num_train} + {num_heldout} questions")


def search_index(
    corpus: Annotated[Path, typer.Argument(help='JSONL file of {"text": ...}, with "id" or without.')],
    encoder: Annotated[
        Path | None, typer.Option(help="Folder of an encoder of Hugging Face: the index is of its vectors, not BM25's.")
    ] = None,
    batch: Annotated[int, count("Passages that are encoded at a time.")] = 256,
) -> None:
    """Write the index of a corpus, into a folder beside it, for `slimrl.agent.search:search`."""
    with exit_codes():
        if not corpus.is_file():
            raise ValueError(f"{corpus}: no such file")
        if encoder is None:
            from slimrl.agent.retrieval.bm25 import write_bm25

            write_bm25(corpus, show_progress=sys.stderr.isatty())
        else:
            _encode(corpus, encoder, batch)
        typer.echo(f"{corpus}.index: {'BM25' if encoder is None else encoder}")


def _encode(corpus: Path, encoder: Path, batch: int) -> None:
    import torch

    from slimrl.agent.retrieval.dense import write_dense
    from slimrl.agent.retrieval.encoder import Encoder
    from slimrl.observability.progress import Progress
    from slimrl.observability.terminal import plain_console

    model = Encoder(encoder, "cuda" if torch.cuda.is_available() else "cpu")
    with Progress(0, plain_console(stderr=True)) as progress, progress.phase("encoding", 0, "passages") as phase:
        write_dense(corpus, model, batch, phase.update)
