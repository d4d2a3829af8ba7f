"""Model drafters: propose tokens with a small model or a head, on the worker's device."""
