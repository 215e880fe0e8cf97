"""Drafts are made where they pay. Times of steps are made up: a fixed part, one for each token."""

import random

import pytest

from engine.speculation.gate import PROBE_EVERY, Gate


def shares_with_drafts(*, num_rows, acceptance, token_s, num_drafts=4, step_s=0.010, seed=0):
    """Of the last 400 of 1,000 steps: the share that had drafts."""
    gate, draw, passed = Gate(), random.Random(seed), []
    for _ in range(1000):
        drafts = num_drafts * num_rows
        pays = gate.pays(num_drawing=num_rows, num_tokens=num_rows, num_drafts=drafts)
        passed.append(pays)
        drafts *= pays
        num_tokens = num_rows + drafts
        gate.ran(
            num_tokens=num_tokens,
            num_drafts=drafts,
            num_confirmed=sum(draw.random() < acceptance for _ in range(drafts)),
            run_s=(step_s + token_s * num_tokens) * draw.uniform(0.9, 1.3),
        )
    return sum(passed[-400:]) / 400


@pytest.mark.parametrize("num_rows", [1, 4, 32])
def test_where_tokens_cost_nothing_drafts_are_made_at_any_acceptance(num_rows):
    assert shares_with_drafts(num_rows=num_rows, acceptance=0.1, token_s=0.0) > 0.5


def test_with_few_sequences_good_guesses_pay_and_with_many_they_do_not():
    # 10 ms to read the weights, 0.5 ms for each token: 1 row 10.5 ms, with drafts 12.5 ms
    assert shares_with_drafts(num_rows=1, acceptance=0.6, token_s=0.0005) > 0.95
    # 64 rows 42 ms, with drafts 170 ms, for 2.4 times the tokens at most
    assert shares_with_drafts(num_rows=64, acceptance=0.35, token_s=0.0005) < 0.1


def test_bad_guesses_end_what_good_ones_would_be_worth():
    shares = [
        shares_with_drafts(num_rows=16, acceptance=acceptance, token_s=0.0005)
        for acceptance in (0.9, 0.05)
    ]
    assert shares[0] > 0.95
    assert shares[1] < 0.1


def test_a_shut_gate_looks_again_now_and_then_and_an_open_one_too():
    share = shares_with_drafts(num_rows=64, acceptance=0.0, token_s=0.01)
    assert 0.5 / PROBE_EVERY < share < 2 / PROBE_EVERY
    share = shares_with_drafts(num_rows=64, acceptance=1.0, token_s=0.0)
    assert 1 - 2 / PROBE_EVERY < share < 1 - 0.5 / PROBE_EVERY


def test_the_gate_follows_a_change_of_work():
    gate = Gate()

    def run(acceptance, num_steps):
        passed = 0
        for _ in range(num_steps):
            pays = gate.pays(num_drawing=16, num_tokens=16, num_drafts=64)
            passed += pays
            num_tokens = 16 + 64 * pays
            gate.ran(
                num_tokens=num_tokens,
                num_drafts=64 * pays,
                num_confirmed=int(64 * pays * acceptance),
                run_s=0.010 + 0.0003 * num_tokens,
            )
        return passed / num_steps

    run(0.0, 500)
    assert run(0.0, 300) < 0.1
    run(0.9, 2000)
    assert run(0.9, 300) > 0.9


def test_time_spent_on_making_drafts_counts():
    def share(propose_s):
        gate, passed = Gate(), 0
        for _ in range(600):
            pays = gate.pays(num_drawing=1, num_tokens=1, num_drafts=4)
            passed += pays
            gate.ran(
                num_tokens=1 + 4 * pays,
                num_drafts=4 * pays,
                num_confirmed=2 * pays,
                run_s=0.010,
                propose_s=propose_s * pays,
            )
        return passed / 600

    assert share(0.001) > 0.95
    assert share(0.100) < 0.5
