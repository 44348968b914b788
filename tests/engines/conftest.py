"""Assertions of the shared contract suite are rewritten by pytest, as those of test files are."""

import pytest

pytest.register_assert_rewrite("engines.contract")
