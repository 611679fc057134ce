"""The Ray side of a run: the cluster, placement, actors and groups of them."""
