"""How do results become files? Workers append them to part files of their own, and the end makes one of those."""
