"""Simulation of a queue of jobs and its workers in virtual time."""
