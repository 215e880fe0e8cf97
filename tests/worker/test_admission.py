"""How many messages a worker takes, and which jobs share the engine after a crash."""

from hypothesis import given
from hypothesis import strategies as st

from worker.admission import (
    UNKNOWN_LOAD,
    EngineRoom,
    LengthGuess,
    Load,
    free_places,
    may_join,
    room_of_foreground,
)


def room(**values) -> EngineRoom:
    return EngineRoom(**{"max_num_seqs": 16, "free_tokens": 8192, "num_waiting": 0} | values)


def load(**values) -> Load:
    usual = {"num_seqs": 1, "prompt_tokens": 10, "max_tokens": 50, "generated_tokens": 0}
    return Load(**usual | {"started": False} | values)


def places(engine_room: EngineRoom, loads: list[Load], max_jobs: int = 1000) -> int:
    return free_places(engine_room, loads, LengthGuess(), max_jobs=max_jobs)


def test_an_idle_worker_takes_one_job_whatever_it_may_need():
    assert places(room(free_tokens=16), []) == 1


def test_a_job_that_only_scores_its_prompt_counts_as_what_it_is():
    guess = LengthGuess()
    assert guess.growth(load(prompt_tokens=40, max_tokens=0)) == 40
    assert guess.growth(UNKNOWN_LOAD) == guess.prompt_tokens + guess.completion_tokens


def test_seats_are_filled_with_a_few_jobs_more_waiting_for_theirs():
    assert places(room(), [load()] * 10) == 8  # 16 seats, 2 wait
    assert places(room(), [load()] * 18) == 0


def test_a_job_of_several_samples_takes_as_many_seats():
    assert places(room(), [load(num_seqs=8)]) == 10


def test_the_kv_cache_bounds_what_is_taken_when_seats_are_free():
    # 1,024 free, 10 + 50 promised to the one that has not begun; 256 guessed for each new one
    assert places(room(free_tokens=1024), [load()]) == 3


def test_a_started_job_is_counted_by_what_it_may_still_grow():
    begun = load(started=True, generated_tokens=49)
    assert places(room(free_tokens=257), [begun]) == 1
    assert places(room(free_tokens=256), [begun]) == 0


def test_sequences_waiting_for_blocks_close_the_door():
    assert places(room(num_waiting=3), [load()]) == 0


def test_messages_whose_rows_are_not_read_yet_count_too():
    assert places(room(), [UNKNOWN_LOAD] * 18) == 0


def test_the_pools_limit_bounds_the_jobs_in_hand():
    assert places(room(), [load()] * 3, max_jobs=4) == 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(0, 20_000))
def test_no_more_is_taken_than_there_are_seats_or_blocks(num_seqs, free_tokens):
    guess = LengthGuess()
    loads = [load(num_seqs=n) for n in num_seqs]
    taken = free_places(room(free_tokens=free_tokens), loads, guess, max_jobs=1000)
    assert taken >= 0
    if taken:
        assert sum(num_seqs) + taken <= 16 + 2
        needed = sum(map(guess.growth, loads)) + taken * guess.growth(UNKNOWN_LOAD)
        assert needed <= free_tokens


def test_the_guess_rises_fast_and_falls_slowly():
    guess = LengthGuess()
    guess.learn(prompt_tokens=128, completion_tokens=1128)
    assert guess.completion_tokens == 428
    guess.learn(prompt_tokens=128, completion_tokens=28)
    assert guess.completion_tokens == 408


def test_fresh_jobs_run_together():
    assert may_join(0, [0] * 63, max_crashes=3, max_num_seqs=64)


def test_suspects_run_in_halves():
    assert may_join(1, [1] * 31, max_crashes=3, max_num_seqs=64)
    assert not may_join(1, [1] * 32, max_crashes=3, max_num_seqs=64)
    assert not may_join(0, [1] * 32, max_crashes=3, max_num_seqs=64)


def test_a_job_at_its_last_chance_runs_alone():
    assert may_join(2, [], max_crashes=3, max_num_seqs=64)
    assert not may_join(2, [0], max_crashes=3, max_num_seqs=64)
    assert not may_join(0, [2], max_crashes=3, max_num_seqs=64)


@given(st.sets(st.integers(0, 11), max_size=3), st.integers(2, 5))
def test_only_the_jobs_that_crash_the_engine_are_ever_blamed_for_it(poison, max_crashes):
    """The engine dies whenever a poison job runs; a job is given up at `max_crashes` deaths."""
    crash_counts = dict.fromkeys(range(12), 0)
    queue, done, given_up = list(range(12)), set(), set()
    while queue:
        running = []
        for job in list(queue):
            if not may_join(
                crash_counts[job],
                [crash_counts[other] for other in running],
                max_crashes=max_crashes,
                max_num_seqs=12,
            ):
                break
            running.append(job)
            queue.remove(job)
        if poison.isdisjoint(running):
            done.update(running)
            continue
        for job in running:
            crash_counts[job] += 1
            (given_up.add if crash_counts[job] == max_crashes else queue.append)(job)
    assert given_up == poison
    assert done == set(range(12)) - poison


def test_the_background_takes_no_room_from_what_somebody_waits_for():
    rows = [load(started=True, generated_tokens=30)] * 16
    full = room(free_tokens=0, num_waiting=5)
    assert places(full, rows) == 0
    seen = room_of_foreground(full, rows)
    assert (seen.free_tokens, seen.num_waiting) == (16 * 40, 0)
    assert places(seen, []) == 1
    assert places(seen, [load(started=True, generated_tokens=49)] * 3) == 2
    assert places(seen, [load()] * 18) == 0


def test_what_waits_in_the_engine_beyond_the_background_closes_the_door():
    assert places(room_of_foreground(room(num_waiting=5), [load()] * 2), [load()]) == 0
