"""WHAT YOU WANT: stages, the pipeline they form, and the units that share workers. Pure."""
