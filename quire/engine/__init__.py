"""Engine assembly, and the messages between engine and client processes."""
