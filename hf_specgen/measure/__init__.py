"""Timing and comparing texts; used by bench, training and planning."""
