"""What holds of the batcher for every sequence of arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.shadow.pipeline.reader import Batcher

pytestmark = pytest.mark.property

MAX_ITEMS, MAX_BYTES, DELAY_S = 5, 40, 1.0
ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 8), st.integers(0, 30), st.sampled_from((0.0, 0.25, 0.5))
    ),
    max_size=40,
)


@given(ARRIVALS)
def test_every_entry_leaves_once_in_order_and_in_bounds(arrivals: list[tuple[str, int, int, float]]) -> None:
    """Nothing is lost, doubled or mixed; batches, waiting times and waiting bytes stay within their bounds."""
    batcher: Batcher[tuple[int, str, int, float]] = Batcher(
        max_items=MAX_ITEMS, max_bytes=MAX_BYTES, delay_s=DELAY_S
    )
    now_s, waiting, left = 0.0, 0, []
    for number, (key, n_items, n_bytes, pause_s) in enumerate(arrivals):
        now_s += pause_s
        batches = batcher.due(now_s)
        for batch in batches:
            assert all(now_s - entry[3] <= DELAY_S + 0.5 for entry in batch)
        entry = (number, key, n_items, now_s)
        batches += batcher.add(key, entry, n_items=n_items, n_bytes=n_bytes, now_s=now_s)
        waiting += n_bytes - sum(arrivals[e[0]][2] for batch in batches for e in batch)
        assert waiting <= MAX_BYTES
        assert batcher.wait_s(now_s) <= DELAY_S
        left += batches
    left += batcher.flush()
    assert sorted(entry[0] for batch in left for entry in batch) == list(range(len(arrivals)))
    for batch in left:
        assert len({entry[1] for entry in batch}) == 1
        assert len(batch) == 1 or sum(entry[2] for entry in batch) <= MAX_ITEMS
    for key in "abc":
        numbers = [entry[0] for batch in left for entry in batch if entry[1] == key]
        assert numbers == sorted(numbers)
