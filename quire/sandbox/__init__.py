"""Sandboxed worker processes: run work that untrusted input could break; they may be killed.

    parent process                           worker process
    tenant_turns.py: which job is next
    worker_pool.py: replaces workers
    worker_handle.py: waits, counts, kills   worker_loop.py: runs job after job
                                             limits.py: resources of one job; OOM priority
                                             landlock.py: closes files, network and processes
    pipe.py: messages with a length prefix, both ways

Users: grammars (quire.grammar.compilation.compile_worker), chat templates
(quire.text.templates.render_worker), images and video (quire.media.media_worker).
"""
