"""What a call of ``generate()`` may ask, and what it returns."""
