"""A bar that is not met is named, one that nobody looked at too, and runs may be put together."""

import pytest

from tests.chaos.report import CONTROL, WASTE, Report, bars, broken, table
from tests.chaos.run import Result


def results() -> list[Result]:
    kill = "kill -9 of a worker"
    drains = {"drains": 20.0, "drain_exit_s_max": 4.0, "drain_bound_s": 5.0}
    waste = {"tokens_made": 1000.0, "tokens_kept": 990.0, "tokens_computed_again": 80.0}
    neighbours = {"neighbours": 7.0, "neighbours_byte_equal": 7.0}
    redis = {"submits_without_redis": 7.0, "submits_answered_without_redis": 7.0}
    return [
        Result(scenario="kill_workers", seed=0, jobs=10_000, kills=150, stops=50,
               recoveries={kill: [3.0] * 19 + [9.0]}, bounds={kill: 8.0}),
        Result(scenario="drain", seed=0, figures=drains),
        Result(scenario="poison", seed=0, figures=neighbours),
        Result(scenario="kill_redis", seed=0, figures=redis),
        Result(scenario=WASTE, seed=0, figures=waste | {"wasted_share": 0.01}),
        Result(scenario=CONTROL, seed=0, stale_accepted=3, violations=["I2: twice"]),
    ]  # fmt: skip


def test_a_run_that_shows_all_is_whole():
    assert broken(results(), whole=True) == []
    assert {bar.holds for bar in bars(results())} == {True}
    assert len(table(results()).splitlines()) == 2 + len(results()) + 1


def change(results: list[Result], name: str, **values) -> None:
    (each,) = [each for each in results if each.scenario == name]
    for key, value in values.items():
        mine = getattr(each, key)
        setattr(each, key, mine | value if isinstance(mine, dict) else value)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("kill_workers", {"jobs": 9_999}, "jobs: 9,999"),
        ("kill_workers", {"kills": 149}, "kills and stops: 199"),
        ("kill_workers", {"lost": 1}, "lost: 1"),
        ("kill_workers", {"duplicates": 1}, "duplicates: 1"),
        ("kill_workers", {"stale_accepted": 1}, "stale accepted: 1"),
        ("kill_workers", {"false_202s": 1}, "false 202s: 1"),
        ("kill_workers", {"blocks_leaked": 1}, "blocks leaked: 1"),
        ("kill_workers", {"violations": ["I8: other words"]}, "kill_workers: I8"),
        ("kill_workers", {"recoveries": {"kill -9 of a worker": [3, 9, 9]}}, "recovery from"),
        ("poison", {"figures": {"neighbours_byte_equal": 6.0}}, "neighbours"),
        ("kill_redis", {"figures": {"submits_answered_without_redis": 6.0}}, "submits answered"),
        (WASTE, {"figures": {"wasted_share": 0.03}}, "tokens wasted"),
        ("drain", {"figures": {"drains": 19.0}}, "drains under load: 19"),
        ("drain", {"figures": {"drain_exit_s_max": 5.1}}, "slowest drain"),
        (CONTROL, {"violations": []}, "without a fence"),
    ],
)
def test_what_does_not_hold_is_named(name, values, said):
    changed = results()
    change(changed, name, **values)
    found = broken(changed, whole=True)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize("name", ["drain", "poison", "kill_redis", WASTE, CONTROL])
def test_a_whole_run_lacks_no_scenario_and_a_part_may(name):
    without = [each for each in results() if each.scenario != name]
    assert len(broken(without, whole=True)) == 1
    assert broken(without, whole=False) == []


def test_a_later_result_takes_the_place_of_an_older_one(tmp_path):
    how = {"command": "c", "load_before": 1.0}
    for result in results():
        Report(tmp_path).add(result, how)
    Report(tmp_path).add(Result(scenario="drain", seed=1, lost=1), how)
    report = Report(tmp_path)
    assert [each.scenario for each in report.results()] == [each.scenario for each in results()]
    assert "| lost | 0 | 1 | **no** |" in report.page()
    assert "| drains under load | at least 20 |  | not run |" in report.page()
