"""`python placed_actors.py ADDRESS`: what Ray gives to actors at the slots of a placement, as JSON, without their work.

Four trainer ranks, and two engines of two GPUs that share them, on a cluster that counts GPUs.
"""

import json
import sys

import ray

from slimrl.config.env_vars import thread_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.runtime.cluster.placement import place
from slimrl.runtime.cluster.reservation import Reservation, cluster_nodes


@ray.remote
class Probe:
    def seen(self) -> tuple[str, list[str]]:
        """Id of the node, and the GPUs that are this process's."""
        return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


def main(address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    recipe = Recipe()
    recipe.rollout.colocated = True
    recipe.rollout.engine_tp = 2
    nodes, resource = cluster_nodes(private=False)
    placement = place(recipe, nodes, num_ranks=4, num_engines=2)
    places = Reservation(placement, resource)

    ranks = [Probe.options(**places.options(slot, thread_variables(1))).remote() for slot in placement.ranks]  # type: ignore[attr-defined]
    engines = [Probe.options(**places.options(slots[0], thread_variables(1))).remote() for slots in placement.engines]  # type: ignore[attr-defined]
    found = ray.get([probe.seen.remote() for probe in (*ranks, *engines)], timeout=100)
    result = {
        "resource": resource,
        "ranks": found[:4],
        "engines": [
            {"node": node, "own": own, "devices": places.devices(slots)}
            for (node, own), slots in zip(found[4:], placement.engines, strict=True)
        ],
        "rank_nodes": [slot.node.node_id for slot in placement.ranks],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
