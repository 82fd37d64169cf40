"""Any file in place of the journal gives a state, or an error that names the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hoop.errors import FailedPrecondition
from hoop.membership.heartbeats import DetectorConfig
from hoop.membership.journal import FileJournal, encode

small = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
fields = [
    "info",
    "device",
    "health",
    "id",
    "members",
    "generation",
    "broken_by",
    "reason",
    "finalized",
    "host",
]
entries = st.dictionaries(st.sampled_from(fields), small | st.dictionaries(st.sampled_from(fields), small), max_size=8)
kinds = st.sampled_from(["device_joined", "device_gone", "communicator", "communicator_destroyed", "other", 7])
lines = st.builds(lambda entry, kind: encode({**entry, "kind": kind}), entries, kinds)
encoded_lines = lines | small.map(lambda value: encode(value))  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(encoded_lines | st.binary(max_size=40), max_size=5))
@example([encode({**dict.fromkeys(fields), "kind": "communicator", "members": "", "reason": []})])
def test_any_file_gives_a_state_or_an_error_that_names_it(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_bytes(b"".join(parts))
        refusal = ""
        try:
            FileJournal(path, DetectorConfig(), 0.0).close()
        except FailedPrecondition as error:
            refusal = str(error)
        # The error names the file, and the file is unchanged.
        assert not refusal or (str(path) in refusal and path.read_bytes() == b"".join(parts))
