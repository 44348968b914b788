"""Runs, services and simulations: engine, controller, observers, source and sink assembled and driven."""
