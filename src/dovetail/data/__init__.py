"""WHERE ITEMS COME FROM AND GO: the two ends of a stream."""
