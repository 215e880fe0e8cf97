"""A loop is found at the token that closes it, and nowhere else."""

from hypothesis import given
from hypothesis import strategies as st

from engine.repetition import LoopDetector
from engine.sampling_params import RepetitionDetection


def ends_in_a_loop(token_ids, detection):
    """By its definition: some pattern stands min_count times at the end."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        length = size * detection.min_count
        if len(token_ids) >= length:
            pattern = token_ids[-size:]
            if token_ids[-length:] == pattern * detection.min_count:
                return True
    return False


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=60),
    max_pattern_size=st.integers(1, 8),
    min_count=st.integers(2, 5),
    data=st.data(),
)
def test_it_says_at_each_token_what_the_definition_says(
    token_ids, max_pattern_size, min_count, data
):
    detection = RepetitionDetection(
        max_pattern_size=max_pattern_size,
        min_count=min_count,
        min_pattern_size=data.draw(st.integers(1, max_pattern_size)),
    )
    detector = LoopDetector(detection)
    found = [detector.add(token_id) for token_id in token_ids]
    assert found == [ends_in_a_loop(token_ids[: i + 1], detection) for i in range(len(token_ids))]


def test_a_pattern_longer_than_asked_for_is_no_loop():
    detector = LoopDetector(RepetitionDetection(max_pattern_size=3, min_count=2))
    assert not any(detector.add(token_id) for token_id in [1, 2, 3, 4] * 5)
