"""What a job's settings may be on the wire and in the journal: JSON of an object, at most 64 KiB.

The coordinator keeps them for as long as it knows the job and sends them to every device that joins it. What the
object holds is checked by ``engine.settings``, where it is used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hoop.errors import InvalidArgument
from hoop.texts import parse_json, printable

MAX_SETTINGS_BYTES = 64 * 1024
MAX_NAME_BYTES = 256


def check_settings(text: str) -> dict[str, Any]:
    """The settings as an object; raises what is wrong with them, with the remedy."""
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
    """What a job trains, out of its settings; a question mark where they do not say."""
    try:
        name = check_settings(settings).get("job")
    except InvalidArgument:
        name = None
    return printable(name, MAX_NAME_BYTES) if isinstance(name, str) else "?"
