"""Which item goes where now, and when do workers start, stop or move? Pure: events and the time in, commands out."""
