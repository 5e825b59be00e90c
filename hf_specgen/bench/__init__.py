"""Measure: prompts, timed runs, reports, plots and exactness checks."""
