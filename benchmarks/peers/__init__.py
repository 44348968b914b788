"""The systems Dovetail is compared with, each in a virtual environment of its own."""
