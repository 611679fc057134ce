"""Which engine serves a request: closed cases, and random orders of events against loads that the test adds up."""

import random
from collections import Counter, defaultdict

import pytest

from slimrl.data.engine import GenerateRequest
from slimrl.engines import load_balancing
from slimrl.engines.load_balancing import EngineChoice

A, B, C = "http://a", "http://b", "http://c"
SEEDS = range(60)


def ask(session: str, tokens: tuple[int, ...] = (1, 2), new: int = 8) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=list(tokens), temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=new,
        stop_token_ids=(), timeout_s=20.0,
    )  # fmt: skip


def choice(*urls: str) -> EngineChoice:
    made = EngineChoice()
    made.use(urls or (A, B))
    return made


def test_a_session_stays_and_its_group_follows_while_the_loads_are_alike(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_balancing, "READ_WEIGHT", 100)
    state = choice()
    first = state.begin(ask("g/0"))
    assert [state.begin(ask(f"g/{i}")) for i in range(1, 5)] == [first] * 4
    # Another prompt goes to the engine with nothing to do.
    other = state.begin(ask("h/0", (7,)))
    assert {first, other} == {A, B}
    for i in range(5):
        state.end(first, ask(f"g/{i}"))
    assert state.begin(ask("g/3", (1, 2, 5, 5))) == first


def test_a_prefix_is_given_up_where_the_load_is_more_than_reading_it_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_balancing, "READ_WEIGHT", 10)
    state = choice()
    # 2 tokens in and 17 out; reading the input counts as 20.
    first = state.begin(ask("g/0", new=17))
    assert state.begin(ask("g/1", new=17)) == first
    other = state.begin(ask("g/2"))
    assert other != first
    state.end(other, ask("g/2"))
    # From now on both have the prompt, and the less loaded one takes it.
    assert [state.begin(ask(f"h/{i}", new=17)) for i in range(3)] == [other, other, first]
    # A session whose prefix is long stays where one with a shorter would move.
    state.end(first, ask("h/2", new=17))
    state.end(other, ask("h/0", new=17))
    assert state.loads[first] - state.loads[other] == 19
    assert state.begin(ask("g/0", (1,), new=1)) == other
    assert state.begin(ask("g/1", (1, 2, 3), new=1)) == first


def test_an_engine_that_was_not_reached_is_avoided_until_it_is_forgiven():
    state = choice()
    first = state.begin(ask("s"))
    state.end(first, ask("s"))
    state.avoid(first)
    other = state.begin(ask("s"))
    assert other != first
    assert state.has_others
    state.avoid(other)
    # Somebody has to be asked.
    assert not state.has_others
    assert state.begin(ask("t")) in (A, B)
    state.forgive(first)
    assert state.begin(ask("s")) == first
    state.avoid(first)
    state.use((A, B))
    assert not state.avoided


def test_without_an_engine_there_is_none_and_a_session_moves_when_its_engine_leaves():
    state = EngineChoice()
    assert state.begin(ask("s")) is None
    assert not state.has_others
    state.use((A,))
    assert state.begin(ask("s")) == A
    state.use((B,))
    assert state.begin(ask("s")) == B
    state.use((A, B))
    assert state.begin(ask("s")) == B


def test_processes_that_know_nothing_of_each_other_choose_alike_and_prompts_spread():
    chosen = [choice(A, B, C).begin(ask(f"s{i}", (i,))) for i in range(90)]
    assert chosen == [choice(C, A, B).begin(ask(f"other {i}", (i,))) for i in range(90)]
    assert all(15 <= count <= 45 for count in Counter(chosen).values())


def test_only_the_latest_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_balancing, "MAX_PROMPTS", 3)
    state = choice()
    for i in range(9):
        state.begin(ask(f"s{i}", (i,)))
        state.begin(ask(f"again {i}", (0,)))
    assert list(state.prompts) == [hash((each,)) for each in (7, 8, 0)]


def test_random_orders_of_events_keep_loads_prefixes_and_the_bound():
    moves = 0
    for seed in SEEDS:
        rng, state = random.Random(seed), EngineChoice()
        running: list[tuple[str, GenerateRequest]] = []
        last: dict[str, str] = {}
        had: defaultdict[tuple[int, ...], set[str]] = defaultdict(set)
        live: list[str] = []
        avoided: set[str] = set()
        for _ in range(400):
            event = rng.choices(["begin", "end", "use", "avoid", "forgive", "close"], [12, 9, 0.3, 0.5, 0.5, 2])[0]
            if event == "begin":
                session = f"s{rng.randrange(40)}"
                tokens = (1,) * rng.choice([1, 5, 200]) + (rng.randrange(4),)
                request = ask(session, tokens, rng.choice([1, 64, 500, 4000]))
                loads = dict.fromkeys(live, 0)
                for url, other in running:
                    if url in loads:
                        loads[url] += len(other.input_ids) + other.max_new_tokens
                url = state.begin(request)
                usable = [each for each in live if each not in avoided] or live
                if not usable:
                    assert url is None
                    continue
                assert url in usable
                least = min(loads[each] for each in usable)
                bound = load_balancing.READ_WEIGHT * len(tokens)
                assert loads[url] - least <= bound
                prefixed = [each for each in usable if each in ({last[session]} if session in last else had[tokens])]
                best = min((loads[each] for each in prefixed), default=bound + least + 1)
                if best - least < bound:
                    assert url in prefixed
                    assert loads[url] == best
                elif best - least > bound:
                    assert loads[url] == least
                moves += session in last and url != last[session]
                if session not in last:
                    had[tokens].add(url)
                last[session] = url
                running.append((url, request))
            elif event == "end" and running:
                state.end(*running.pop(rng.randrange(len(running))))
            elif event == "use":
                live = rng.sample([A, B, C], rng.randint(0, 3))
                avoided = set()
                state.use(live)
            elif event == "avoid" and live:
                avoided.add(url := rng.choice(live))
                state.avoid(url)
            elif event == "forgive" and avoided:
                avoided.remove(url := rng.choice(sorted(avoided)))
                state.forgive(url)
            elif event == "close":
                last.pop(session := f"s{rng.randrange(40)}", None)
                state.close(session)
            assert state.sessions == last
        for url, request in running:
            state.end(url, request)
        assert not any(state.loads.values())
    assert moves > 100
