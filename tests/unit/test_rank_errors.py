"""What ranks decide together about a fault that one of them met."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from thread_meeting import Meeting

from slimrl.data.engine import EngineError
from slimrl.resync.engine_calls import EngineCalls
from slimrl.resync.ranks import Ranks, StartAgain, sync_errors_across_ranks
from slimrl.resync.report import ResyncError


class ThreadRanks:
    """The part of Ranks that sync_errors_across_ranks needs, for two ranks that are threads of this process."""

    def __init__(self, rank, meeting):
        self.rank, self._meeting = rank, meeting

    def gather_objects(self, value):
        return self._meeting.exchange(self.rank, value)

    def agree(self, value):
        return max(self.gather_objects(value))


class Probed:
    """The part of EngineControl that sync_errors_across_ranks needs."""

    def __init__(self, name, *, lives):
        self.name, self._lives = name, lives

    def probe(self, timeout_s):
        if not self._lives:
            raise EngineError(f"{self.name}: no answer")


def raised_by(fleets, errors):
    """What each of two ranks raises; None where nothing."""
    meeting = Meeting(2)

    def run(rank):
        try:
            sync_errors_across_ranks(ThreadRanks(rank, meeting), fleets[rank], 7, "at bucket 3", errors[rank])
        except (StartAgain, ResyncError) as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def fleets(*lives):
    engines = [Probed(f"engine {number}", lives=each) for number, each in enumerate(lives)]
    return EngineCalls(engines, 1.0), EngineCalls([], 1.0)


def test_without_an_error_all_go_on():
    assert raised_by(fleets(True), (None, None)) == [None, None]


@pytest.mark.parametrize(("lives", "left"), [((True, False), ["engine 0"]), ((True, True), None)])
def test_all_start_again_without_an_engine_that_died_and_give_up_where_it_is_nobody_s_fault(lives, left):
    both = fleets(*lives)
    found = raised_by(both, (EngineError("broadcast: closed by peer"), None))
    assert [type(error) for error in found] == [ResyncError if left is None else StartAgain] * 2
    if left is None:
        assert "at bucket 3: broadcast: closed by peer" in str(found[1])
    else:
        assert [engine.name for engine in both[0].engines] == left
        assert "engine 1: no answer" in both[0].failed["engine 1"]


def test_weights_that_cannot_be_sent_are_nobody_else_s_fault():
    found = raised_by(fleets(True, False), (None, ValueError("w: NaN")))
    assert [type(error) for error in found] == [ResyncError] * 2
    assert "w: NaN" in str(found[0])


def test_what_is_nobody_s_fault_but_ours_is_raised_as_it_is():
    for engines in (fleets(True)[0], EngineCalls([], 1.0)):
        with pytest.raises(KeyError, match="a bug"):
            sync_errors_across_ranks(Ranks("", 5), engines, 7, "at bucket 3", KeyError("a bug"))
