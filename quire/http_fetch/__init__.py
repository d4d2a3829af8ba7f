"""Fetches content from addresses that clients give, checked and bounded.

    url.py     parses a text to an HttpUrl, once; which network addresses are allowed
    fetch.py   resolves, checks, and connects to what was checked; redirects, limits

Models from a hub, which the operator names, are loaded by quire.weights.hub.
"""
