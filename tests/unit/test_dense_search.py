"""Search by vectors: the encoder against transformers in float64, the best passages against brute force."""

import json
import random
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from slimrl.agent.retrieval.corpus_index import folder_of
from slimrl.agent.retrieval.dense import (
    KIND,
    MAX_QUERIES,
    ROWS,
    VECTORS,
    DenseIndex,
    best_rows,
    open_dense,
    write_dense,
)
from slimrl.agent.retrieval.encoder import POOLINGS, Encoder
from slimrl.agent.search import search
from slimrl.agent.tools import make_tool
from slimrl.config.agent_rules import agent_file_violations
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.recipe import Recipe

WORDS = [f"w{number}" for number in range(60)]


def write_encoder(folder, seed=0, **files):
    """A random BERT of two layers whose tokens are WORDS, with further files of JSON."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS) + 5, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizerFast(vocab={token: place for place, token in enumerate(tokens)}).save_pretrained(folder)
    for name, content in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 18))) for _ in range(2 * ROWS + 77)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, encoder, texts):
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text, "id": f"p{n}"}) + "\n" for n, text in enumerate(texts)))
    write_dense(file, Encoder(encoder), 256, lambda done, total: None)
    return file


def modules(pooling):
    told = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    told.append({"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    return {"modules": told, "1_Pooling__config": pooling}


def reference(folder, text, pooling="mean"):
    """The vector of one text, without padding, in float64."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    with torch.no_grad():
        states = model(torch.tensor([ids[:23] + ids[-1:] if len(ids) > 24 else ids])).last_hidden_state[0].numpy()
    pooled = {"mean": states.mean(0), "cls": states[0], "max": states.max(0), "lasttoken": states[-1]}[pooling]
    return pooled / np.sqrt((pooled**2).sum())


SAMPLE = ["w1", "w1 w2 w3 w4 w5 w6 w7", "w9 w8", " ".join(WORDS[:40])]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers_whatever_they_are_padded_with(tmp_path, pooling):
    folder = write_encoder(tmp_path, **modules({"pooling_mode": pooling}))
    expected = np.array([reference(folder, text, pooling) for text in SAMPLE])
    assert np.abs(Encoder(folder).texts(SAMPLE).numpy() - expected).max() < 2e-6


def test_the_older_form_of_a_pooling_is_read_and_prefixes_are_put_before_texts_and_queries(tmp_path):
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    prompts = {"prompts": {"query": "w58 ", "document": "w59 "}}
    limit = {"max_seq_length": 4}
    folder = write_encoder(
        tmp_path, **modules(pooling), config_sentence_transformers=prompts, sentence_bert_config=limit
    )
    made = Encoder(folder)
    expected = [reference(folder, text, "cls") for text in ("w58 w1", "w59 w1", "w59 w1")]
    given = torch.cat([made.queries(["w1"]), made.texts(["w1", "w1 w2 w3"])]).numpy()
    assert np.abs(given[:2] - expected[:2]).max() < 2e-6
    # Of the last text two tokens are left: the prefix and w1.
    assert np.abs(given[2] - expected[2]).max() < 2e-6


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (modules({"pooling_mode": ["mean", "cls"]}), "its pooling is mean and cls"),
        (modules({"pooling_mode_weightedmean_tokens": True}), "its pooling is weightedmean"),
        ({"modules": [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]}, "modules.json has Dense"),
    ],
)
def test_an_encoder_that_is_not_supported_is_refused(tmp_path, files, problem):
    with pytest.raises(ValueError, match=problem):
        Encoder(write_encoder(tmp_path, **files))


def test_the_passages_are_those_of_brute_force(corpus, encoder, texts):
    vectors = np.load(folder_of(corpus, KIND) / VECTORS).astype(np.float64)
    assert np.abs(vectors[:40] - [reference(encoder, text) for text in texts[:40]]).max() < 1e-3
    for query in ("w1 w2", "w50", "w7 w8 w9 w10 w11"):
        products = vectors @ reference(encoder, query)
        found = [
            int(line.split("]")[0][2:]) for line in search(query, str(corpus), 7, "dense", str(encoder)).split("\n")
        ]
        assert [products[place] for place in found] == pytest.approx(np.sort(products)[::-1][:7], abs=1e-6)


def test_of_equal_passages_the_first_ones_are_found_and_all_if_as_many_are_asked_for():
    vectors = torch.zeros(ROWS + 5, 2, dtype=torch.float16)
    vectors[[3, 4, ROWS + 2], 0] = 1
    query = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert best_rows(vectors, query, 4).tolist() == [[3, 4, ROWS + 2, 0], [0, 1, 2, 5]]
    assert sorted(best_rows(vectors, query, ROWS + 5)[0].tolist()) == list(range(ROWS + 5))


def test_queries_that_come_at_once_are_computed_together_and_each_gets_its_own_answer(corpus, encoder):
    index = open_dense(corpus, encoder)
    expected = {word: index.find(word, 2 + number % 3) for number, word in enumerate(WORDS)}
    sizes, given, encode = [], {}, index._encode
    index._encode = lambda queries: sizes.append(len(queries)) or encode(queries)
    threads = [
        threading.Thread(target=lambda number=number, word=word: given.update({word: index.find(word, 2 + number % 3)}))
        for number, word in enumerate(WORDS)
    ]
    with index._computing:
        for thread in threads:
            thread.start()
        while len(index._arrived) < len(WORDS):
            pass
    for thread in threads:
        thread.join(60)
    assert given == expected
    assert sizes == [min(len(WORDS), MAX_QUERIES)]


def test_an_encoder_that_fails_fails_every_query_and_the_next_one_is_answered():
    def broken(queries):
        raise MemoryError("no room")

    index = DenseIndex(["a"], torch.ones(1, 1, dtype=torch.float16), broken)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            index.find("x", 1)
    assert not index._arrived
    index._encode = lambda queries: torch.ones(len(queries), 1)
    assert index.find("x", 1) == ["a"]


def test_what_is_missing_or_does_not_belong_together_is_refused(corpus, encoder, tmp_path):
    other = write_encoder(tmp_path / "other", seed=1)
    with pytest.raises(RuntimeError, match="another encoder made its vectors"):
        search("w1", str(corpus), 3, "dense", str(other))
    alone = tmp_path / "alone.jsonl"
    alone.write_text('{"text": "w1"}\n')
    with pytest.raises(
        RuntimeError, match=r"there is no index. Make it: slimrl-tools search-index .*alone\.jsonl --enc"
    ):
        search("w1", str(alone), 3, "dense", str(encoder))
    with pytest.raises(RuntimeError, match="encoder: is missing"):
        search("w1", str(alone), 3, "dense")
    with pytest.raises(RuntimeError, match="retriever: 'bm26' is neither bm25 nor dense"):
        search("w1", str(alone), 3, "bm26")
    with pytest.raises(RuntimeError, match="no encoder; it is a folder"):
        search("w1", str(corpus), 3, "dense", str(tmp_path / "nowhere"))


def test_the_model_sees_neither_retriever_nor_encoder():
    plain, dense = make_tool(search, {"corpus": "c"}), make_tool(search, {"corpus": "c", "retriever": "dense"})
    assert list(plain.schema["function"]["parameters"]["properties"]) == ["query", "num_results"]
    assert (plain.fixed["retriever"], dense.fixed["retriever"], dense.fixed["encoder"]) == ("bm25", "dense", "")


def test_an_index_that_is_absent_is_missed_when_the_recipe_is_checked(tmp_path, corpus, encoder):
    def missed(corpus, **arguments):
        given = {"corpus": str(corpus), "encoder": str(encoder)} | arguments
        recipe = Recipe(agent=AgentConfig(tools=["slimrl.agent.search:search"], tool_args=given))
        return list(agent_file_violations(recipe))

    assert missed(corpus, retriever="dense") == []
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text())
    make = f"slimrl-tools search-index {other} --encoder {encoder}"
    said = f"{other}: has no index of vectors. Make it: {make}"
    assert missed(other, retriever="dense") == [("agent.tool_args.corpus", said)]
    assert missed(other) == []
