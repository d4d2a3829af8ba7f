"""Scheduler-side data types and logic of the engine. Standard library only."""
