"""`python -m slimrl.launch.allreduce`: one node's part of the all-reduce probe, see allreduce_probe.py.

1. Every node but the head connects to the head's store by host name. The route gives its own address and interface,
   and tells the head under which address others reach it.
2. All ranks (one per GPU; without GPUs one per node) join a process group on those interfaces, NCCL on GPUs and gloo
   on CPUs, and all-reduce a tensor whose sum is known.
3. Each node that passed writes a report with its address.
"""

import argparse
import json
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from slimrl.launch.preflight import interface_environment, local_addresses, node_name
from slimrl.launch.reports import NodeReport, write_report

ELEMENTS = 4 * 2**20
"""Number of elements of the summed tensor: 16 MiB, too large for NCCL's low-latency protocols."""


def main() -> None:
    """All-reduce with the group of nodes that the plan puts this one in, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="JSON written by the job, see AllReduceProbe._group")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    node = node_name()
    group = next((group for group in plan["groups"] if node in group["nodes"]), None)
    if group is None:
        return
    address, interface = probe(
        node, group["nodes"], group["hosts"], group["port"], timeout_s=arguments.timeout_s, gpus=arguments.gpus
    )
    report = NodeReport(node=node, addresses={address: interface}, gpus=arguments.gpus)
    write_report(arguments.plan.parent, report)


def probe(
    node: str, nodes: list[str], hosts: Mapping[str, str], port: int, *, timeout_s: float, gpus: int
) -> tuple[str, str]:
    """All-reduce within a group; returns this node's address on the route to the head, and its interface.

    Args:
        nodes: of the group, the head first.
        hosts: host name of each node.
        port: of the head's store.
        gpus: of each node; 0 sums on the CPU.

    Raises:
        RuntimeError: nodes were late, or the sum is wrong.
    """
    rank, timeout = nodes.index(node), timedelta(seconds=timeout_s)
    store = TCPStore(hosts[nodes[0]], port, len(nodes), is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    interfaces = local_addresses()
    if rank:
        address, peer = route_to(hosts[nodes[0]], port)
        store.set("head", peer)
    else:
        address = store.get("head").decode() if len(nodes) > 1 else lone_address(interfaces)
    if address not in interfaces:
        raise RuntimeError(f"{node}: others reach it at {address}, which none of its interfaces has: {interfaces}")
    interface = interfaces[address]
    store.set(f"address {rank}", address)
    # The head's address, not its name, which may resolve to 127.0.1.1 on the head itself.
    head = store.get("address 0").decode()
    ranks_per_node = max(1, gpus)
    os.environ.update(interface_environment(interface))
    arguments = (rank * ranks_per_node, len(nodes) * ranks_per_node, head, port, timeout, bool(gpus))
    if ranks_per_node == 1:
        _sum(0, *arguments)
    else:
        mp.spawn(_sum, args=arguments, nprocs=ranks_per_node)
    # The head serves the store until all nodes are done with it.
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(len(nodes))], timeout)
    return address, interface


def route_to(host: str, port: int) -> tuple[str, str]:
    """This machine's address on the route to a host, and the host's. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        datagram.connect((host, port))
        return datagram.getsockname()[0], datagram.getpeername()[0]


def lone_address(interfaces: Mapping[str, str]) -> str:
    """Address of a node without others: the first that is not loopback, else 127.0.0.1."""
    return next((address for address in interfaces if not address.startswith("127.")), "127.0.0.1")


def _sum(local_rank: int, first_rank: int, world: int, head: str, port: int, timeout: timedelta, cuda: bool) -> None:
    rank = first_rank + local_rank
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = TCPStore(head, port, is_master=False, timeout=timeout)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    tensor = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    expected = world * (world + 1) / 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"rank {rank}: the all-reduce of {world} ranks gave {tensor[0].item()}, not {expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
