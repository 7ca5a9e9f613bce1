"""JSON whose objects name every key once."""

import json
from typing import Any


def parse(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is no JSON (json.JSONDecodeError), or an object names a key twice, of which json alone would keep the last.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} appears twice; keep one")
    return result
