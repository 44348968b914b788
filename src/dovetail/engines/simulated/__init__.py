"""What would happen on a cluster of any size? The engine port in virtual time, with a world that can be described."""
