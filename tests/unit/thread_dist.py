"""The part of torch.distributed that a resync needs, for ranks that are threads of the test's process."""

import pickle
import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from thread_meeting import TIMEOUT_S, Meeting


class Group:
    def __init__(self, ranks):
        self.ranks, self._meeting = ranks, Meeting(len(ranks))

    def exchange(self, rank, value):
        return self._meeting.exchange(self.ranks.index(rank), value)


class Receipt:
    def __init__(self, tensor, box):
        self._tensor, self._box = tensor, box

    def wait(self):
        self._tensor.copy_(self._box.get(timeout=TIMEOUT_S))


class Sending:
    """Reads what it sends when it is waited for, as a backend may."""

    def __init__(self, tensor, box):
        self._tensor, self._box = tensor, box

    def wait(self):
        self._box.put(self._tensor.clone())


class ThreadDist:
    """Stands in for the module; groups are made by all ranks together, in one order."""

    ReduceOp = dist.ReduceOp
    isend, irecv = "send", "receive"

    def __init__(self, size):
        self._size, self._groups, self._here, self._lock = size, {}, threading.local(), threading.Lock()
        self._boxes = defaultdict(queue.SimpleQueue)
        self.left = set()

    def run(self, work):
        """What `work` gives for each rank, called in a thread as that rank."""

        def as_rank(rank):
            self._here.rank, self._here.made = rank, 0
            return work(rank)

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(as_rank, range(self._size)))

    @property
    def made(self):
        """(rank, ranks of the group) of all groups and members, as `left` has those that were left."""
        return {(rank, group.ranks) for group in self._groups.values() for rank in group.ranks}

    def is_initialized(self):
        return hasattr(self._here, "rank")

    def get_rank(self):
        return self._here.rank

    def get_world_size(self):
        return self._size

    def new_group(self, ranks, timeout=None, backend=None):
        with self._lock:
            group = self._groups.setdefault(self._here.made, Group(tuple(ranks)))
        self._here.made += 1
        assert group.ranks == tuple(ranks)
        return group

    def destroy_process_group(self, group):
        assert group in self._groups.values()
        self.left.add((self._here.rank, group.ranks))

    def all_reduce(self, value, op=ReduceOp.SUM, group=None):
        values = torch.stack(group.exchange(self._here.rank, value.clone()))
        value.copy_(values.amax(0) if op == self.ReduceOp.MAX else values.sum(0))

    def all_gather_object(self, values, value, group=None):
        values[:] = group.exchange(self._here.rank, value)

    def barrier(self, group=None):
        group.exchange(self._here.rank, None)

    def broadcast_object_list(self, values, src=0, group=None, device=None):
        # As between processes, nobody gets the other's own object.
        sent = group.exchange(self._here.rank, pickle.dumps(values) if self._here.rank == src else None)
        values[:] = pickle.loads(sent[group.ranks.index(src)])

    def all_to_all_single(self, received, sent, received_sizes=None, sent_sizes=None, group=None):
        parts = sent.clone().split(sent_sizes if sent_sizes is not None else 1)
        of_all = group.exchange(self._here.rank, parts)
        mine = torch.cat([each[group.ranks.index(self._here.rank)] for each in of_all])
        assert received_sizes in (None, [len(each[group.ranks.index(self._here.rank)]) for each in of_all])
        received.copy_(mine)

    def P2POp(self, function, tensor, peer, group=None):
        assert {self._here.rank, peer} <= set(group.ranks)
        return function, tensor, peer

    def batch_isend_irecv(self, operations):
        works = []
        for function, tensor, peer in sorted(operations, key=lambda operation: operation[0] != self.isend):
            if function == self.isend:
                works.append(Sending(tensor, self._boxes[self._here.rank, peer]))
            else:
                works.append(Receipt(tensor, self._boxes[peer, self._here.rank]))
        return works
