"""Flight recorder, recording files and replay."""
