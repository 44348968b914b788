"""Claims: how several runs share one machine or one Ray cluster, each within the amounts granted to it.

A claim here is a share of a machine. In `jobs/`, to claim is to take a job from a queue; what the worker then has is
called a lease.
"""
