"""Random models of stated sizes, for tests, benchmarks and the quickstart."""
