"""A kernel that waits for ever must not hold the machine."""

import faulthandler

import pytest

SECONDS_PER_TEST = 300


@pytest.fixture(autouse=True)
def _watchdog():
    """Prints every thread's stack and ends the process when a test takes too long."""
    faulthandler.dump_traceback_later(SECONDS_PER_TEST, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
