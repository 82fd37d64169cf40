"""How instructions are worded, and in which order they are given."""

from __future__ import annotations

from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState, Member, State

Result = tuple[State, tuple[m.Instruction, ...]]


def announce(kind: str, member: Member, what: str) -> m.Announce:
    return m.Announce(kind, f"{member.info} {what}", {"device": member.info.device_id})


def tell(kind: str, one: CommunicatorState, what: str) -> m.Announce:
    fields = {"communicator": one.id, "generation": one.generation}
    return m.Announce(kind, f"communicator {one.id} {kind.split('_')[1]} {what}".rstrip(), fields)


def in_order(
    record: m.Record, news: m.Announce, broken: tuple[m.Instruction, ...]
) -> tuple[m.Instruction, ...]:
    """What broke is written before why: a journal that ends between them must not call it whole."""
    records = tuple(one for one in broken if isinstance(one, m.Record))
    return (*records, record, news, *(one for one in broken if not isinstance(one, m.Record)))
