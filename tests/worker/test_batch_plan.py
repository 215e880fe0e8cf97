"""Rows that begin alike run one after another, and long ones first."""

import random
import tracemalloc
from contextlib import closing
from itertools import groupby

import pytest

from worker.batch_plan import PIECE, Plan, beginning

URL = "/v1/completions"


def order(*rows: tuple[object, bytes], first=0, url=URL, planned=True) -> list[int]:
    with closing(Plan(planned=planned)) as plan:
        for number, (max_tokens, text) in enumerate(rows):
            plan.add(number, 1000 + number, url, max_tokens, text)
        found = list(plan.rows(first=first))
    assert all(each.start == 1000 + each.number for each in found)
    return [each.number for each in found]


@pytest.mark.parametrize("run", range(5))
def test_every_beginning_s_rows_are_neighbours(run):
    """Of any tree of texts, at each depth: a walk through it comes to each branch once."""
    draw = random.Random(run)
    branches = [b""]
    for _ in range(3):
        branches = [
            branch + bytes([65 + draw.randrange(26)]) * PIECE * draw.randint(1, 3)
            for branch in branches
            for _ in range(draw.randint(1, 4))
        ]
    texts = [draw.choice(branches) + b"and a question" for _ in range(200)]
    found = order(*((16, text) for text in texts))
    assert sorted(found) == list(range(200))
    for depth in range(1, 10):
        walk = [texts[number][: depth * PIECE] for number in found]
        heads = [key for key, _ in groupby(walk)]
        assert len(heads) == len(set(heads)), f"a beginning of {depth} pieces comes twice"


def test_rows_that_share_nothing_keep_their_order():
    assert order(*((16, b"short %d" % i) for i in range(50))) == list(range(50))


def test_what_may_become_long_begins_early():
    rows = [(16, b"a"), (1000, b"b"), (None, b"c"), (64, b"d"), ("?", b"e")]
    assert order(*rows) == [1, 3, 0, 2, 4]  # without a limit of its own: 16, the endpoint's
    assert order(*rows, url="/v1/chat/completions") == [2, 4, 1, 3, 0]  # what the model takes


def test_it_goes_on_from_any_place_and_can_leave_the_file_s_order():
    rows = [(2**i, b"x") for i in range(8)]
    assert order(*rows) == [7, 5, 6, 3, 4, 1, 2, 0]
    assert order(*rows, first=6) == [2, 0]
    assert order(*rows, planned=False) == list(range(8))


def test_a_beginning_is_a_prefix_as_long_as_texts_agree():
    one, other = b"a" * 300 + b"b" * 100, b"a" * 300 + b"c" * 100
    assert beginning(one)[:16] == beginning(other)[:16] == beginning(b"a" * 300)
    assert beginning(one)[16:20] != beginning(other)[16:20]


def test_rows_that_are_the_same_come_last_behind_one_another():
    kinds = [b"a", None, b"b", b"a", b"a", None, b"b"]
    with closing(Plan()) as plan:
        for number, same in enumerate(kinds):
            plan.add(number, number, URL, 16, b"x" * PIECE, same=same)
        places = [(each.number, each.previous) for each in plan.rows()]
        assert plan.num_same == 3
        assert places == [(0, None), (1, None), (2, None), (5, None), (3, 0), (4, 3), (6, 2)]
        for first, num in ((0, 3), (3, 2), (4, 2), (4, 9), (1, 2), (6, 1), (7, 5)):
            taken = [(each.number, each.previous) for each in plan.take(first, num)]
            assert taken == places[first:][:num]


@pytest.mark.long
def test_its_memory_has_a_bound():
    tracemalloc.start()
    with closing(Plan()) as plan:
        for number in range(100_000):
            plan.add(number, number, URL, 16, b"%d" % (number % 1000) * 500)
        assert sum(1 for _ in plan.rows()) == 100_000
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
