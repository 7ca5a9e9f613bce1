"""Whole matrices over slices: ownership and exchange in a data-parallel group. Imports torch only."""
