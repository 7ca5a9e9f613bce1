"""Asynchronous pipelines as data: schedule, weight versions, simulator. Imports torch only."""
