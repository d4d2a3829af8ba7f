"""Server processes: supervisor, API processes, sockets."""
