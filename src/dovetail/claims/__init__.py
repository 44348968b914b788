"""WHO ELSE IS HERE: how several runs share one machine, each within what it was granted."""
