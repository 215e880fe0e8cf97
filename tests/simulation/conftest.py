"""What simulations share."""

import logging

import pytest

from tests.simulation.servers import say_nothing


@pytest.fixture(autouse=True)
def quiet():
    loggers = [logging.getLogger(name) for name in ("worker", "jobs")]
    levels = [logger.level for logger in loggers]
    say_nothing()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
