"""docs/proof.md names the test that holds each case; a test that is gone holds nothing."""

import re

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "proof.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
# of queue and transport, of store and protocol, of engines, of batches
CASES = {
    *(f"Q{n:02}" for n in (*range(1, 13), 14, 15, 16, 17, 20, 22)),
    *(f"D{n:02}" for n in (1, 2, 3, 4, 5, 6, 11, 12, 14, 15, 19)),
    *(f"E{n}" for n in (13, 14, 15, 17, 20, 21, 28, 31, 32)),
    *(f"B{n:02}" for n in (1, 2, 4, 5, 6, 8)),
}


def test_every_test_that_the_page_names_is_there():
    named = NAMED.findall(PAGE)
    assert len(named) > 30
    for path, name in named:
        text = (REPOSITORY / path).read_text()
        assert not name or f"def {name}(" in text, (path, name)


def test_every_case_has_a_line_and_none_has_two():
    listed = re.findall(r"^\| ([QDEB]\d\d) \|", PAGE, re.M)
    assert sorted(listed) == sorted(CASES)
