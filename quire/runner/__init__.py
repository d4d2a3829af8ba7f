"""Model runner: executes step inputs on a device."""
