"""Diagnosis of what does not fit: reasons per node, and changes that were tried and would fit."""
