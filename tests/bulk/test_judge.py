"""What is delivered: each kind of check, what it says of a fault, and what is flagged."""

import pytest

from bulk.errors import SpecError
from bulk.judge import Judge, flags_of, repeats
from bulk.pace import Pace
from bulk.spec import Check, Input, Length, Output, Spec

SCHEMA = {
    "type": "object", "required": ["age"], "additionalProperties": False,
    "properties": {"age": {"type": "integer", "minimum": 0}},
}  # fmt: skip


def judge(*checks, folder=None):
    spec = Spec(
        model="m", input=Input(path="x"), output=Output(path="y"), prompt="z", validate=[*checks]
    )
    return Judge(spec, folder)


def kind_and_reason(check, text, row=None, flags=(), folder=None):
    return judge(check, folder=folder)(text, row or {}, [*flags])


@pytest.mark.parametrize(
    ("check", "good", "bad", "said"),
    [
        (Check(json_schema=SCHEMA), '{"age": 3}', '{"age": -1}', "$.age: -1 is less than"),
        (Check(json_schema=SCHEMA), ' {"age": 3}\n', '{"age": 3', "it is not JSON"),
        (Check(json_schema=SCHEMA), '{"age": 0}', '{"age": NaN}', "NaN is not a JSON number"),
        (Check(json_schema=SCHEMA), '{"age": 0}', "[" * 100_000, "it is not JSON"),
        (Check(json_schema=SCHEMA), '{"age": 0}', "{}", "'age' is a required property"),
        (Check(regex="[a-z]+"), "abc", "abc1", "does not match [a-z]+"),
        (Check(regex="a.b"), "a\nb", "xa\nb", "does not match"),
        (Check(length=Length(min_chars=2)), "ab", "a", "1 characters, at least 2"),
        (Check(length=Length(max_words=2)), "a b", "a b c", "3 words, at most 2"),
    ],
)
def test_a_check_takes_the_good_and_says_what_is_wrong_with_the_bad(check, good, bad, said):
    assert kind_and_reason(check, good) is None
    kind, reason = kind_and_reason(check, bad)
    assert getattr(check, kind) is not None
    assert said in reason


def test_a_function_of_the_user_s_judges_by_the_row(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def good(text, row):\n"
        "    if text == 'raise':\n        raise KeyError('x')\n"
        "    return row['want'] in text or 'it lacks ' + row['want']\n"
        "def no(text, row):\n    return False\n"
    )
    check = Check(python="mine.py:good")
    assert kind_and_reason(check, "a cat", {"want": "cat"}, folder=tmp_path) is None
    assert kind_and_reason(check, "a dog", {"want": "cat"}, folder=tmp_path) == (
        "python", "it lacks cat"
    )  # fmt: skip
    assert "raised KeyError" in kind_and_reason(check, "raise", folder=tmp_path)[1]
    assert kind_and_reason(Check(python="mine:no"), "x", folder=tmp_path)[1] == (
        "no says it is not good"
    )
    with pytest.raises(SpecError, match=r"validate\[0\]\.python: mine\.py:gone cannot be loaded"):
        judge(Check(python="mine.py:gone"), folder=tmp_path)


def test_the_first_fault_counts_and_flags_may_be_one():
    both = judge(Check(regex="a*"), Check(no_flags=["truncated"]))
    assert both("aaa", {}, []) is None
    assert both("aaa", {}, ["repetition"]) is None
    assert both("aaa", {}, ["truncated"]) == ("no_flags", "it is flagged: truncated")
    assert both("b", {}, ["truncated"])[0] == "regex"


def test_a_check_that_cannot_be_made_is_the_spec_s_fault():
    with pytest.raises(SpecError, match=r"validate\[0\]\.json_schema is no JSON schema"):
        judge(Check(json_schema={"type": "integr"}))
    with pytest.raises(SpecError, match=r"validate\[1\]\.regex does not compile"):
        judge(Check(regex="a"), Check(regex="("))


@pytest.mark.parametrize(
    ("text", "goes_in_circles"),
    [
        ("a" * 48, True),
        ("x " * 30, True),
        ("The end. " * 6, True),
        ("It began. " + "and so it went on and on, without an end in sight, " * 4, True),
        ("ha ha ha", False),
        ("a" * 20, False),
        ("one two three four five six seven eight nine ten " * 2, False),
        ("", False),
        ("a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v", False),
        ("=" * 47, False),
    ],
)
def test_a_tail_in_circles_is_repetition(text, goes_in_circles):
    assert repeats(text) is goes_in_circles


def test_what_is_flagged_is_what_the_engine_says_and_what_is_seen():
    assert flags_of("fine", "stop", None) == []
    assert flags_of("fine", "length", None) == ["truncated"]
    assert flags_of("fine", "deadline", None) == ["truncated"]
    assert flags_of("fine", "stop", "repetition_detected") == ["repetition"]
    assert flags_of("no " * 40, "length", None) == ["truncated", "repetition"]


def test_the_time_left_is_an_interval_that_is_as_wide_as_the_pace_was_uneven():
    even, uneven = Pace(), Pace()
    assert even.left_s(100) is None
    for second in range(80):
        even.mark(float(second), 10 * second, 100 * second)
        uneven.mark(float(second), 10 * second + (40 if second % 20 > 9 else 0), 0)
    low, high = even.left_s(1000)
    assert low == pytest.approx(100) == high
    assert even.tokens_per_s() == pytest.approx(100)
    low, high = uneven.left_s(1000)
    assert low < 99
    assert high > 101


def test_a_standstill_has_no_end_in_sight():
    pace = Pace()
    for second in range(20):
        pace.mark(float(second), 5, 0)
    assert pace.left_s(10) is None
