"""How does what was decided become done? Commands out, events in, one loop. Streams, roles and jobs all use it."""
