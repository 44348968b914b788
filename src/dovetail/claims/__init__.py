"""Claims: how several runs share one machine or one Ray cluster, each within the amounts granted to it."""
