"""Maintainers' clocks: they are not in the wheel."""
