"""Encoders, part files and final files for every output format."""
