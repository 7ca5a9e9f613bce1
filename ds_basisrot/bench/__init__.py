"""Measurements: the optimizer beside others on given gradients, what staleness costs a small model, schedules with real processes."""
