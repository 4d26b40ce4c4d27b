"""The pool of cache blocks: one owner for each block, and nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from atomc.runtime.scheduling.blocks import BlockPool


def test_a_table_grows_only_at_block_borders():
    pool = BlockPool(num_blocks=4, block_size=16)
    assert pool.reserve("a", 16)
    assert len(pool.table("a")) == 1
    first = pool.table("a")
    assert pool.reserve("a", 17)
    assert len(pool.table("a")) == 2 and pool.table("a")[:1] == first
    assert pool.reserve("a", 5)
    assert len(pool.table("a")) == 2


def test_a_reservation_that_does_not_fit_changes_nothing():
    pool = BlockPool(num_blocks=3, block_size=2)
    assert pool.reserve("a", 4)
    before = pool.table("a")
    assert not pool.reserve("a", 7)
    assert not pool.reserve("b", 3)
    assert pool.table("a") == before and pool.table("b") == () and pool.num_free == 1
    assert pool.owners == {"a"}
    pool.check()


def test_released_blocks_can_be_owned_again():
    pool = BlockPool(num_blocks=2, block_size=1)
    assert pool.reserve("a", 2) and not pool.reserve("b", 1)
    pool.release("a")
    assert pool.num_free == 2 and not pool.owners
    assert pool.reserve("b", 2)
    pool.check()


def test_tokens_in_use_are_those_computed_and_a_shared_one_counts_once():
    pool = BlockPool(8, 4)
    assert pool.reserve("a", 12) and pool.tokens_used({"a": 9}) == 9
    for place, key in enumerate((b"0", b"1")):
        pool.cache("a", place, key)
    assert pool.admit("b", [b"0", b"1"], 10, 10)
    assert pool.tokens_used({"a": 9, "b": 8}) == 9
    assert pool.tokens_used({"a": 12, "b": 10}) == 14
    pool.release("a")
    assert pool.tokens_used({"b": 10}) == 10


def test_tokens_that_left_a_window_are_not_in_use():
    pool = BlockPool(8, 4, windows=(6,))
    assert pool.reserve("a", 16)
    pool.trim("a", 16)
    assert pool.tokens_used({"a": 16}) == 8  # those read are 6; blocks are let go of whole


def test_releasing_an_owner_of_nothing_is_fine():
    pool = BlockPool(num_blocks=1, block_size=1)
    pool.release("a")
    pool.check()
    assert pool.num_free == 1


def test_blocks_without_a_name_are_not_found_and_are_still_owned():
    pool = BlockPool(num_blocks=4, block_size=1)
    assert pool.reserve("a", 2)
    for place, key in enumerate((b"x", b"y")):
        pool.cache("a", place, key)
    assert pool.admit("b", [b"x"], 2, 2) and pool.match([b"x", b"y"]) == 2
    pool.evict("b")
    assert pool.match([b"x", b"y"]) == 0 and pool.owners == {"a", "b"}
    pool.check()
    pool.release("a")
    pool.release("b")
    assert pool.num_free == 4
    pool.check()


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    moves=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), max_size=60),
)
def test_no_block_is_lost_or_shared_whatever_the_order(num_blocks, block_size, moves):
    pool = BlockPool(num_blocks, block_size)
    covered: dict[str, int] = {}
    for owner, num_tokens in moves:
        if num_tokens == 0:
            pool.release(owner)
            covered.pop(owner, None)
        elif pool.reserve(owner, num_tokens):
            covered[owner] = max(num_tokens, covered.get(owner, 0))
        pool.check()
        for name in "abcd":
            assert len(pool.table(name)) == -(-covered.get(name, 0) // block_size)
