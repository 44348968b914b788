"""WHAT HAPPENED: a run writes its folder, and everything a person sees is computed from that."""
