"""Local engine: worker processes on this machine, started by a fork server."""
