"""From a validated request to a stream of events, independent of the API."""
