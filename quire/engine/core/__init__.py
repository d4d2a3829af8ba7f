"""Engine loop and its process: one scheduler and one executor, step by step."""
