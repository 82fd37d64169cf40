"""Validation of a job's settings on the wire and in the journal: a JSON object of at most 64 KiB.

The coordinator stores the settings with the job and sends them to every device that joins it. ``engine.settings``
validates the fields.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hoop.errors import InvalidArgument
from hoop.texts import parse_json, printable

MAX_SETTINGS_BYTES = 64 * 1024
MAX_NAME_BYTES = 256


def check_settings(text: str) -> dict[str, Any]:
    """Parse the settings; raises InvalidArgument."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_SETTINGS_BYTES:
        raise InvalidArgument(
            f"settings: {size} bytes are more than the {MAX_SETTINGS_BYTES} that a job may have; keep what is large in "
            "the job's own module, and name that (module:name)"
        )
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InvalidArgument(
            f'settings: {size} bytes that are not JSON: {error}; send an object, such as {{"job": "mnist"}}'
        ) from None
    if not isinstance(found, dict):
        kind = {list: "a list", str: "text", type(None): "null"}.get(type(found), type(found).__name__)
        raise InvalidArgument(f'settings: {kind}, not a JSON object; send one, such as {{"job": "mnist"}}')
    return found


@lru_cache(maxsize=256)
def job_name(settings: str) -> str:
    """The name of the job in its settings, or ``?``."""
    try:
        name = check_settings(settings).get("job")
    except InvalidArgument:
        name = None
    return printable(name, MAX_NAME_BYTES) if isinstance(name, str) else "?"
