"""The scheduler and the block manager under random load: see machine.py for what is checked."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulation.machine import SchedulerMachine


def test_every_sequence_finishes_with_its_own_tokens_under_random_load():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
