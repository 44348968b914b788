"""Who really does it, on a Ray cluster? The only package that imports ray, and only when it is used."""
