"""Fetches content from addresses that clients give, checked and bounded.

    url.py           parses a text to an Address, once; which network addresses are allowed
    fetch.py         resolves, checks, and connects to what was checked; redirects, limits
    local_files.py   opens files below a folder, and nothing outside of it

Models from a hub, which the operator names, are loaded by quire.weights.hub.
"""
