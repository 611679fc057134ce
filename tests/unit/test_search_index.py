"""The index beside a corpus: made once, shared, and not used if it is damaged or of another corpus."""

import json
import logging
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slimrl.agent.retrieval import bm25
from slimrl.agent.retrieval.bm25 import KIND, Bm25Index, open_bm25
from slimrl.agent.retrieval.corpus_index import MANIFEST, ForeignFolder, folder_of
from slimrl.agent.retrieval.passages import read_corpus

WORDS = [f"w{number}" for number in range(300)]


def write_corpus(file, seed=0, count=200):
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 30))) + " \u00e9" for _ in range(count)]
    file.write_text("".join(json.dumps({"text": text, "id": f"p{n}"}) + "\n" for n, text in enumerate(texts)))
    return file


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


@pytest.fixture
def index(corpus):
    open_bm25(corpus)
    return folder_of(corpus, KIND)


def asked(found):
    return [found.find(query, 5) for query in ("w1 w2", "w299", "w5 w5 w7 w100", "nowhere")]


def remade(corpus, caplog):
    """Whether opening says that the index is made; its answers are those of one in memory in any case."""
    with caplog.at_level(logging.WARNING, bm25.__name__):
        caplog.clear()
        assert asked(open_bm25(corpus)) == asked(Bm25Index.build(read_corpus(corpus)))
    return "it is made now" in caplog.text


def test_the_index_is_made_once_and_finds_what_one_in_memory_finds(corpus, caplog):
    assert remade(corpus, caplog)
    assert not remade(corpus, caplog)
    assert all(passage.startswith("[p") and passage.endswith("\u00e9") for passage in open_bm25(corpus).find("w1", 3))


def test_arrays_and_texts_are_mapped_into_memory(corpus, index):
    scores = open_bm25(corpus)._scores.scores
    assert all(isinstance(scores[name], np.memmap) for name in ("data", "indices", "indptr"))


@pytest.mark.parametrize("file", ["data.csc.index.npy", "indptr.csc.index.npy", "vocab.index.json", "passages.bin"])
@pytest.mark.parametrize("harm", ["cut", "flipped", "removed"])
def test_a_damaged_file_is_noticed_and_the_index_is_made_anew(corpus, index, caplog, file, harm):
    data = bytearray((index / file).read_bytes())
    if harm == "removed":
        (index / file).unlink()
    else:
        data[len(data) // 2] ^= 1
        (index / file).write_bytes(data[: len(data) // 2] if harm == "cut" else data)
    assert remade(corpus, caplog)
    assert "missing or damaged" in caplog.text
    assert not remade(corpus, caplog)


def test_a_corpus_that_has_changed_gets_a_new_index_and_a_copy_keeps_it(corpus, index, caplog, tmp_path):
    copy = tmp_path / "copy" / "corpus.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(corpus.read_bytes())
    os.utime(copy, ns=(1, 1))
    shutil.copytree(index.parent, copy.parent / index.parent.name)
    assert not remade(copy, caplog)
    before = corpus.stat()
    write_corpus(corpus, seed=1)
    corpus.write_text(corpus.read_text().ljust(before.st_size, "\n")[: before.st_size])
    corpus.write_text("\n".join(corpus.read_text().split("\n")[:-2]).ljust(before.st_size, "\n"))
    assert corpus.stat().st_size == before.st_size
    assert remade(corpus, caplog)
    assert "is not what the index was made of" in caplog.text


def test_the_index_of_another_version_is_made_anew(corpus, index, caplog):
    told = json.loads((index / MANIFEST).read_text())
    told["made_with"]["bm25s"] = "0.0.1"
    (index / MANIFEST).write_text(json.dumps(told))
    assert remade(corpus, caplog)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_a_folder_that_is_no_index_is_neither_used_nor_removed(corpus, index, text):
    (index / MANIFEST).unlink()
    (index / "mine.txt").write_text("keep")
    if text is not None:
        (index / MANIFEST).write_text(text)
    with pytest.raises(ForeignFolder, match=r"bm25 is no index.* Remove it"):
        open_bm25(corpus)
    assert (index / "mine.txt").read_text() == "keep"


def test_where_nothing_can_be_written_the_index_is_made_in_memory_and_said(corpus, caplog, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with caplog.at_level(logging.WARNING, bm25.__name__):
        assert asked(open_bm25(corpus)) == asked(Bm25Index.build(read_corpus(corpus)))
    assert "makes its own in memory" in caplog.text
    assert not folder_of(corpus, KIND).parent.exists()


def test_several_that_begin_at_once_make_one_index(corpus, caplog):
    """The lock holds between open files, so threads show what processes do."""
    with ThreadPoolExecutor(4) as threads, caplog.at_level(logging.WARNING, bm25.__name__):
        inodes = list(threads.map(_opened, [corpus] * 4))
    assert len(set(inodes)) == 1
    assert caplog.text.count("it is made now") == 1
    assert [folder.name for folder in folder_of(corpus, KIND).parent.iterdir() if folder.is_dir()] == [KIND]


def _opened(corpus):
    open_bm25(corpus)
    return (folder_of(corpus, KIND) / MANIFEST).stat().st_ino


@pytest.mark.parametrize("name", ["a b", "a]", 5])
def test_an_id_that_could_not_be_read_in_an_answer_is_refused(tmp_path, name):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"text": "x", "id": name}))
    with pytest.raises(ValueError, match=r"c\.jsonl.*\"id\" is"):
        read_corpus(file)
