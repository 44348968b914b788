"""Failures in shared suites are explained like those in test files."""

import pytest

pytest.register_assert_rewrite("engines.contract")
