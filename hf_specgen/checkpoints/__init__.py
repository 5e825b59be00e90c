"""Checkpoints of drafters: their configuration, files, layouts and cards."""
