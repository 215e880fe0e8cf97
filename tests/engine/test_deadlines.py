"""Which requests the clock ends, against a dict that forgets nothing it should know."""

from hypothesis import given
from hypothesis import strategies as st

from engine.deadlines import SPARE, Deadlines

EVENTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abcde"), st.integers(1, 20)),
    st.tuples(st.just("drop"), st.sampled_from("abcde"), st.none()),
    st.tuples(st.just("wait"), st.none(), st.integers(0, 5)),
)


@given(st.lists(EVENTS, max_size=60))
def test_each_request_that_has_not_ended_is_told_when_its_time_comes(events):
    deadlines, expected, now = Deadlines(), {}, 0.0
    for arrival, (event, request_id, seconds) in enumerate(events):
        if event == "add" and request_id not in expected:
            expected[request_id] = (now + seconds, arrival)
            deadlines.add(request_id, now + seconds, arrival)
        elif event == "drop":
            expected.pop(request_id, None)
            deadlines.drop(request_id)
        elif event == "wait":
            now += seconds
        due = sorted((at, each) for each, at in expected.items() if at[0] <= now)
        told = []
        while (each := deadlines.pop(now)) is not None:
            told.append(each)
            del expected[each]
            deadlines.drop(each)
        assert told == [each for _, each in due]


def test_ended_requests_leave_no_more_behind_than_there_are_others():
    deadlines = Deadlines()
    for arrival in range(10):
        deadlines.add(f"open {arrival}", 1e6, arrival)
    for arrival in range(10, 5000):
        deadlines.add(str(arrival), 1e6 + arrival, arrival)
        deadlines.drop(str(arrival))
        assert len(deadlines) <= 2 * 11 + SPARE
    assert sorted(iter(lambda: deadlines.pop(1e6), None)) == [f"open {i}" for i in range(10)]
