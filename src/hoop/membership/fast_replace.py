"""``replace`` for the immutable states of this package: ``dataclasses.replace``, in a tenth of its time.

A state machine copies its state several times an event. ``dataclasses.replace`` reads every field and passes it to the
constructor, which sets each one past the guard of a frozen class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace  # the type checker knows the fields
else:

    def replace(one: Any, /, **changes: Any) -> Any:
        """A copy with other values of some fields. Not for classes with ``__post_init__``, which would not run."""
        known = one.__dict__
        fields = known | changes
        if len(fields) != len(known) or hasattr(one, "__post_init__"):
            raise TypeError(f"a {type(one).__name__} cannot be copied with {', '.join(changes)}")
        copy = object.__new__(type(one))
        object.__setattr__(copy, "__dict__", fields)
        return copy
