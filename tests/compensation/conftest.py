"""What tests of this folder share."""

import logging

import pytest


@pytest.fixture
def log():
    """Where a ``Compensator`` logs."""
    return logging.getLogger("test")
