"""KV storage beyond device memory."""
