"""One round: its records, its verdict, its numbers. Nothing here knows a model."""
