"""Run `quire serve` with a limit on open files: python -m tests.server.few_files LIMIT WORDS..."""

import os
import resource
import sys

limit, *words = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
os.execv(sys.executable, [sys.executable, "-m", "quire", "serve", *words])
