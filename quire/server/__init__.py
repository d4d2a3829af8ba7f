"""HTTP server: the app, its state, options and error responses."""
