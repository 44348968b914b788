"""A package, so that it and not the benchmark of the same name is `jobs` in tests."""
