"""Processes that do for us what a stranger's input could make go wrong, and that may be killed.

    ours                                  the worker
    watched.py: waits, counts, kills      desk.py: job after job, and what became of each
                                          limits.py: what one job may take; who goes first
                                          closed.py: a door that falls shut: no files, no network
    pipe.py: words behind their length, both ways

Who uses it: grammars (quire.grammar.compilation.compile_worker, hired), chat templates
(quire.text.templates.render_worker).
"""
