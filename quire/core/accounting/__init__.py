"""Time and step accounting, metric definitions, snapshots."""
