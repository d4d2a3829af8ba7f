"""Op dispatch, lazy fusion on the GPU, and kernel compilation."""
