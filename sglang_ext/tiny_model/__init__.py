"""Checkpoints of random weights that are whole in every other respect, for laptops and tests."""
