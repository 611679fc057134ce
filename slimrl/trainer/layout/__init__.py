"""Which rank holds what: process groups, a fake world, holders of weights."""
