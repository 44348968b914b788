"""RUN IT: engine, controller, observers, data and the loop put together."""
