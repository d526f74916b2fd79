"""Laws of routing. The loads of groups differ by a bounded amount. Requests with the same prefix go
to the same group. A group that accepts no requests gets none.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.kv.block_pool import BlockPool, hash_block, salted_root
from dist_aclgraph.scheduler.routing import (
    REQUEST_TOKENS,
    WORTH_OF_CACHED,
    PrefixMemory,
    RequestRouter,
    block_hashes,
    choose_group,
)

BLOCK = 4
loads = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), min_size=1, max_size=6)


def make_router(*names: str, cache_blocks: int = 1000, first: int = 0) -> RequestRouter:
    router = RequestRouter(first)
    for name in names:
        router.add(name, cache_blocks, BLOCK)
    return router


def prompt(*tokens: int) -> bytes:
    return pack_ints(list(tokens))


def begin(seed: int, count: int) -> list[int]:
    return [1000 * seed + i for i in range(count)]


@given(loads, st.integers(0, 9))
def test_the_chosen_group_has_at_most_twice_its_cached_tokens_more_to_do(groups, first):
    waiting, cached = map(list, zip(*groups, strict=True))

    chosen = choose_group(waiting, cached, first)

    assert waiting[chosen] <= min(waiting) + WORTH_OF_CACHED * cached[chosen]


@given(loads, st.integers(0, 9), st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_groups(groups, first, random):
    order = list(range(len(groups)))
    random.shuffle(order)

    def work_of(found):
        waiting, cached = map(list, zip(*found, strict=True))
        return found[choose_group(waiting, cached, first)]

    assert work_of(groups) == work_of([groups[i] for i in order])


def test_equal_groups_take_turns():
    router = make_router("a", "b", "c")

    found = [router.route(str(i), prompt(i), "", ["a", "b", "c"]) for i in range(6)]

    assert sorted(found) == ["a", "a", "b", "b", "c", "c"]


def test_equal_beginnings_meet_while_loads_are_near_and_part_when_they_are_not():
    router = make_router("a", "b")
    shared = begin(1, 500)
    found = [router.route(str(i), prompt(*shared, 9000 + i), "", ["a", "b"]) for i in range(40)]

    assert found[0] == found[1] == found[2]
    # The group with the prefix has so many requests that waiting for it costs more than the prefix
    # saves.
    assert {"a", "b"} == set(found)


def test_a_salt_keeps_equal_beginnings_apart():
    router = make_router("a", "b")
    shared = begin(1, 400)
    first = router.route("1", prompt(*shared, 1), "alice", ["a", "b"])
    router.ended("1")

    counts = router.counts
    router.route("2", prompt(*shared, 1), "bob", ["a", "b"])
    assert sum(count.routed_cached_tokens for count in counts.values()) == 0
    assert router.route("3", prompt(*shared, 1), "alice", ["a", "b"]) == first
    assert counts[first].routed_cached_tokens == 400


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "begin", "end", "hear"]), st.integers(0, 30)),
        max_size=60,
    )
)
def test_loads_are_never_below_the_open_requests(moves):
    router = make_router("a", "b")
    open_requests: dict[str, str] = {}
    for number, (move, value) in enumerate(moves):
        if move == "send":
            name = str(number)
            open_requests[name] = router.route(name, prompt(*begin(value % 3, value + 1)), "",
                                               ["a", "b"])  # fmt: skip
        elif move == "hear":
            router.hear("a", value)
        elif open_requests:
            name = sorted(open_requests)[value % len(open_requests)]
            if move == "begin":
                router.begun(name)
            else:
                router.ended(name)
                del open_requests[name]
        for group in "ab":
            count = sum(chosen == group for chosen in open_requests.values())
            assert router.load(group) >= count * REQUEST_TOKENS
    for name in open_requests:
        router.ended(name)
    assert router.load("a") == router.load("b") == 0


@given(st.lists(st.integers(1, 40), max_size=80), st.sampled_from([("b",), ("b", "c")]))
def test_a_group_that_takes_no_requests_gets_none(sizes, alive):
    router = make_router("a", "b", "c")
    router.route("first", prompt(*begin(1, 64)), "", ["a"])

    found = {router.route(str(i), prompt(*begin(1, n)), "", alive) for i, n in enumerate(sizes)}

    assert "a" not in found


@given(st.lists(st.integers(1, 60), min_size=8, max_size=60))
def test_no_group_is_starved_by_prompts_that_begin_alike(sizes):
    """Even if no request ends, the loads of two groups differ by a bounded amount, which depends on
    the largest prompt.
    """
    router = make_router("a", "b")
    for i, count in enumerate(sizes):
        router.route(str(i), prompt(*begin(1, count)), "", ["a", "b"])

    assert (
        abs(router.load("a") - router.load("b"))
        <= (1 + WORTH_OF_CACHED) * max(sizes) + REQUEST_TOKENS
    )


def test_waiting_tokens_of_other_replicas_count():
    router = make_router("a", "b")
    router.hear("a", 1000)

    assert router.route("1", prompt(1, 2, 3), "", ["a", "b"]) == "b"


def test_blocks_are_those_that_the_schedulers_cache_finds():
    tokens = begin(3, 3 * BLOCK)
    hashes = block_hashes(prompt(*tokens), "salt", BLOCK)
    pool = BlockPool(8, BLOCK)
    parent = salted_root("salt")
    for index, block_id in enumerate(pool.allocate(2)):
        parent = hash_block(parent, prompt(*tokens[BLOCK * index : BLOCK * (index + 1)]))
        pool.store(block_id, parent)

    assert len(hashes) == 2, "a token is left to compute"
    assert len(pool.match(hashes)) == 2


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 12))
def test_a_memory_is_bounded_and_forgets_beginnings_last(uses, num_blocks):
    memory = PrefixMemory(num_blocks)
    for use in uses:
        hashes = block_hashes(prompt(*begin(use % 4, use * 2)), "", BLOCK)
        memory.note(hashes)
        assert len(memory) <= num_blocks
        # The memory knows the prefix that was used last: all of its blocks, or as many as the
        # memory can hold.
        assert memory.match(hashes) == min(len(hashes), num_blocks)


def test_a_group_that_began_anew_has_nothing_cached():
    router = make_router("a")
    router.route("1", prompt(*begin(1, 40)), "", ["a"])
    router.hear("a", 70)

    router.forget_cache("a")
    router.route("2", prompt(*begin(1, 40)), "", ["a"])

    assert router.counts["a"].routed_cached_tokens == 0


def test_groups_with_blocks_of_different_sizes_are_each_known_by_their_own():
    router, shared = RequestRouter(), begin(1, 40)
    router.add("small", 1000, 4)
    router.add("large", 1000, 16)
    for i, name in enumerate(["small", "large"]):
        router.route(f"first{i}", prompt(*shared, 1), "", [name])
    for i in range(2):
        router.ended(f"first{i}")

    router.route("a", prompt(*shared, 2), "", ["small"])
    router.route("b", prompt(*shared, 2), "", ["large"])

    counts = router.counts
    assert counts["small"].routed_cached_tokens == 40
    assert counts["large"].routed_cached_tokens == 32
