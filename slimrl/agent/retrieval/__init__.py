"""Finding passages of a corpus: by words (BM25) or by meaning (vectors of an encoder)."""
