"""Driving a transformers model: passes, slots, masks, hidden states, and whether it can be driven at all."""
