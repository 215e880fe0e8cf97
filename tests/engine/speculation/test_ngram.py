"""The index finds what a search of the whole text finds."""

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.ngram import SIZES, NgramIndex


def searched(token_ids, count):
    """The continuation by definition: what stands behind the last like place, again and again."""
    for size in SIZES:
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[-size:]:
                period = token_ids[end:]
                return tuple(period[i % len(period)] for i in range(count))
    return ()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 5), max_size=10),
    st.integers(1, 6),
)
def test_the_index_finds_what_a_search_finds_however_the_text_has_grown(text, cuts, count):
    index, end = NgramIndex(), 1
    for cut in cuts:
        index.continuation(text[:end], count)
        end = min(len(text), end + cut)
    assert index.continuation(text[:end], count) == searched(text[:end], count)


def test_a_text_that_copies_its_beginning_is_foreseen():
    story = [5, 9, 2, 7, 1, 8, 3]
    assert NgramIndex().continuation([*story, 0, 5, 9, 2, 7], 3) == (1, 8, 3)


def test_a_text_that_repeats_itself_goes_on_so():
    assert NgramIndex().continuation([1, 2, 3, 1, 2, 3, 1, 2], 5) == (3, 1, 2, 3, 1)


def test_a_text_like_none_before_has_no_guess():
    assert NgramIndex().continuation([1, 2, 3, 4, 5, 6], 4) == ()
