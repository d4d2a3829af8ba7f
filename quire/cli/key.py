"""quire key NAME: makes a key, and its entry in the key file.

The key is shown once and not stored: the key file has only its digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.errors import ConfigError

KEY_PREFIX = "qk-"
KEY_BYTES = 32


def main(argv: Sequence[str]) -> int:
    """Print a new key, or the digest of an existing one."""
    parser = argparse.ArgumentParser(prog="quire key", description=__doc__)
    parser.add_argument("name", help="owner of the key; keys of one name share their limits")
    parser.add_argument(
        "--add-to", type=Path, metavar="FILE", help="key file (.yaml) to which the entry is added"
    )
    parser.add_argument(
        "--digest", action="store_true", help="read an existing key from standard input"
    )
    args = parser.parse_args(argv)
    key = (
        sys.stdin.readline().strip()
        if args.digest
        else KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    )
    if not key:
        raise ConfigError("--digest reads a key from standard input, which was empty")
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = f'  - name: {json.dumps(args.name)}\n    sha256: "{digest}"\n'
    if args.add_to is not None:
        append_entry(args.add_to, entry)
    if not args.digest:
        print(f"key (shown once): {key}")
    if args.add_to is None:
        print(f"entry of the key file:\n\nkeys:\n{entry}")
    else:
        print(f"added its digest to {args.add_to}: a running server reads it within a second")
    return 0


def append_entry(path: Path, entry: str) -> None:
    """Append an entry to a key file; if the result is invalid, the file stays as it was."""
    from quire.server.auth.api_keys import read_key_file

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--add-to takes a .yaml file, got {str(path)!r}")
    before = path.read_text() if path.exists() else "keys:\n"
    if not before.endswith("\n"):
        before += "\n"
    fresh = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        fresh.touch(mode=0o600)
        fresh.write_text(before + entry)
        read_key_file(fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
