"""A few of the requests of `make fuzz`, on every commit; they are the same each time."""

import pytest

from tests.e2e import fuzz

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def up(tmp_path_factory, tiny_llama_dir):
    running = fuzz.start(tmp_path_factory.mktemp("fuzz"), tiny_llama_dir)
    try:
        yield running
    finally:
        running.end()


def test_no_reply_is_a_fault_or_another_than_the_document_says(up, tmp_path):
    engine = up.descendant("worker.engine_process").pid
    report = fuzz.fuzz(up, tmp_path, num_requests=200, phases="fuzzing", seed=0)
    assert report.passed, report.text
    assert report.num_requests >= 150, report.text
    assert up.descendant("worker.engine_process").pid == engine
