"""What config.json and the user state about quantized weights. Imports no torch."""
