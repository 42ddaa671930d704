"""The planner: every key exactly once, whatever the lengths and the mode."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from leanmla import InvalidArgument
from leanmla.split_plan import choose_chunk, plan_splits

lengths = st.lists(st.integers(0, 5000) | st.sampled_from([0, 1, 63, 64, 65, 131072]), max_size=40)


def assert_covers(plan, lens):
    """Items of a sequence follow each other from 0 to its end; partial slots are dense."""
    position = dict.fromkeys(range(len(lens)), 0)
    for slot, item in enumerate(plan.items):
        assert item.kv_start == min(position[item.seq], lens[item.seq]) and item.kv_end >= item.kv_start
        assert plan.partial_start[item.seq] + item.split == slot
        assert item.num_splits == plan.splits_per_seq[item.seq]
        position[item.seq] = item.kv_end
    assert [position[b] for b in range(len(lens))] == list(lens)
    assert all(count >= 1 for count in plan.splits_per_seq)


@settings(max_examples=200, deadline=None)
@given(
    lens=lengths,
    workers=st.integers(1, 300),
    granularity=st.sampled_from([1, 16, 64, 128]),
    cap=st.none() | st.integers(1, 200),
)
@example(lens=[], workers=4, granularity=64, cap=None)
@example(lens=[131072] + [1] * 127, workers=264, granularity=64, cap=None)
def test_balanced_covers_every_key_once(lens, workers, granularity, cap):
    plan = plan_splits(lens, num_workers=workers, granularity=granularity, max_splits=cap)
    assert_covers(plan, lens)
    for item in plan.items:
        assert item.kv_start % granularity == 0
        assert item.num_keys > 0 or lens[item.seq] == 0, "the balanced mode makes no empty items"
    if cap is not None:
        assert max(plan.splits_per_seq, default=1) <= cap
    taken = sorted((i for q in plan.workers() for i in q), key=lambda i: (i.seq, i.split))
    assert taken == list(plan.items), "every item goes to exactly one worker"


@settings(max_examples=100, deadline=None)
@given(lens=lengths, count=st.integers(1, 64), granularity=st.sampled_from([1, 16, 64]))
@example(lens=[1, 2, 64], count=32, granularity=64)
def test_fixed_count_is_exact(lens, count, granularity):
    plan = plan_splits(lens, num_workers=8, granularity=granularity, num_kv_splits=count)
    assert_covers(plan, lens)
    assert plan.splits_per_seq == (count,) * len(lens)


@settings(max_examples=100, deadline=None)
@given(lens=lengths, size=st.integers(1, 3000))
def test_fixed_size_does_not_depend_on_the_batch(lens, size):
    plan = plan_splits(lens, num_workers=8, split_size=size)
    assert_covers(plan, lens)
    for b, n in enumerate(lens):
        alone = plan_splits([n], num_workers=99, split_size=size)
        ranges = [(i.kv_start, i.kv_end) for i in plan.items if i.seq == b]
        assert ranges == [(i.kv_start, i.kv_end) for i in alone.items]


@pytest.mark.parametrize(
    ("lens", "workers", "items", "balance"),
    [
        ([8192] * 64, 264, 256, 0.95),  # the worked example of choose_chunk
        ([8192] * 256, 264, 256, 0.95),
        ([1024] * 4, 264, 64, 0.2),  # 16 blocks each: no more work than blocks
        ([131072] + [1024] * 31, 264, 240, 0.8),
        ([131072], 264, 256, 0.95),
        ([8192, 1024], 2, 3, 0.8),  # few workers and a skew: the long sequence must be cut
        ([131072, 1024, 1024, 0], 8, 4, 0.85),
    ],
)
def test_known_balance(lens, workers, items, balance):
    plan = plan_splits(lens, num_workers=workers)
    assert len(plan.items) >= items and plan.balance >= balance


@settings(max_examples=100, deadline=None)
@given(lens=st.lists(st.integers(1, 3000), min_size=1, max_size=50), workers=st.integers(1, 200))
def test_model_cost_is_never_worse_than_no_split(lens, workers):
    blocks = [-(-n // 64) for n in lens]
    chunk = choose_chunk(blocks, num_workers=workers)

    def cost(c):
        splits = [max(1, -(-b // c)) for b in blocks]
        unit = max(-(-b // s) for b, s in zip(blocks, splits, strict=True)) + 1
        waves = -(-(sum(blocks) + sum(splits)) // (unit * workers))
        smallest = min(b // s for b, s in zip(blocks, splits, strict=True)) + 1
        return max(waves * unit, -(-sum(splits) // workers) * smallest)

    assert cost(chunk) <= cost(max(blocks))


def test_refusals():
    with pytest.raises(InvalidArgument, match="num_workers: expected a positive integer, got 0"):
        plan_splits([1], num_workers=0)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        plan_splits([1], num_workers=1, num_kv_splits=2, split_size=3)
    with pytest.raises(InvalidArgument, match="got -4 for sequence 1"):
        plan_splits([1, -4], num_workers=1)
