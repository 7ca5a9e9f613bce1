"""Measurements of the optimizer beside others: who takes part, on which gradients, and how time is taken."""
