"""Memory arithmetic: weights, activations and KV blocks of a device."""
