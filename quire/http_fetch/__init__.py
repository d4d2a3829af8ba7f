"""What quire fetches by an address that somebody else gave: checked, bounded, from here alone.

    address.py   a text becomes an Address, once; which network addresses may be spoken to
    fetch.py     resolve, check, connect to what was checked; redirects, limits
    folder.py    files below a folder, without ways out of it

Not here: models from a hub, which whoever serves names (quire.weights.hub).
"""
