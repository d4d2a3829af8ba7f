"""Engine loop and its process: runs one scheduler and one executor, step by step."""
