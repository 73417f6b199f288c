"""Writes a log without its texts: token ids are hashed with a key, and only what is read is kept.

    .venv/bin/python docs/examples/logs/hashed.py KEYFILE < log.jsonl > hashed.jsonl

Lookups need the equality of tokens alone, so a selector is trained on such a log as on any other.
Equal tokens stay equal in all lines: whoever has enough of them can guess common words, so the
result is no anonymous data. Keep the key: in the engine the selector is asked with hashed ids.
"""

import json
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path

from data_gen.texts.log_lines import AbortedRequest, record_of

KEPT = ("drafters", "note", "arrived", "temperature", "kind")


def main() -> None:
    key = Path(sys.argv[1]).read_bytes()[:64]

    @cache
    def hashed(value: object) -> int:
        digest = blake2b(json.dumps(value).encode(), digest_size=4, key=key).digest()
        return int.from_bytes(digest) % (2**31 - 1)

    for line in sys.stdin:
        try:
            record = record_of(json.loads(line))
        except AbortedRequest:
            continue
        kept = {name: record[name] for name in KEPT if record.get(name) is not None}
        for name in ("prompt_token_ids", "generated_token_ids"):
            kept[name] = [hashed(token) for token in record[name]]
        for name in ("id", "source"):
            if record.get(name) is not None:
                kept[name] = hashed(record[name])
        print(json.dumps(kept))


if __name__ == "__main__":
    main()
