"""Native code of media: its sources, and the calls into the compiled library."""
