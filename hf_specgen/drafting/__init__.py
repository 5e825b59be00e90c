"""What drafters share: the interface, lengths, shapes, filling, caches, layers."""
