"""Character-level language modelling: text as windows of fixed length, with the next character as target."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hoop.data.dataset import Batch, BatchBuffers, Indices, Splits, check_indices, read_only, sha256_of
from hoop.data.download import Progress, cache_dir, data_dirs, existing_paths, not_found, read_bounded, verify
from hoop.data.download import download as fetch
from hoop.errors import InvalidArgument, NotFound

SHAKESPEARE = "tinyshakespeare.txt"
SHAKESPEARE_CHECKSUM = "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_BYTES = 16 << 20
"""Read limit in bytes, above the file's size."""
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"

Tokens = npt.NDArray[np.uint32]


class TextData:
    """A text cut into windows of ``context`` characters; the target of each character is the next one.

    Windows are ``context`` + 1 long and overlap by one, so every character is a target once per epoch, except the first
    one and a remainder that fills no window. A token is a character's index in ``vocabulary``.
    """

    fixed = True

    def __init__(self, name: str, tokens: npt.NDArray[np.integer], vocabulary: str, *, context: int) -> None:
        if context < 1:
            raise InvalidArgument(f"context: {context} is not at least 1")
        if len(tokens) <= context:
            raise InvalidArgument(f"context: {name} has {len(tokens)} characters, too few for {context} and one more")
        self.name, self.vocabulary, self.context = name, vocabulary, context
        self.tokens = read_only(tokens.astype(np.uint8 if len(vocabulary) <= 256 else np.uint32))
        self._buffers = BatchBuffers()
        end = (len(tokens) - 1) // context * context
        self._inputs = self.tokens[:end].reshape(-1, context)
        self._targets = self.tokens[1 : end + 1].reshape(-1, context)

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def classes(self) -> int:
        return len(self.vocabulary)

    @functools.cached_property
    def checksum(self) -> str:
        """sha256 of the tokens and the vocabulary."""
        return sha256_of(self.tokens, _codes(self.vocabulary))

    def allocate(self, rows: int) -> Batch:
        shape = (rows, self.context)
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        indices = check_indices(indices, self)
        batch, (inputs, targets) = self._buffers.rows(out, len(indices), self)
        inputs[...] = self._inputs[indices]
        targets[...] = self._targets[indices]
        return batch

    def encode(self, text: str) -> torch.Tensor:
        """The tokens of a text, e.g. of a prompt."""
        if unknown := sorted(set(text) - set(self.vocabulary)):
            raise InvalidArgument(f"text: {''.join(unknown)[:40]!r} does not occur in {self.name}")
        return torch.tensor([self.vocabulary.index(character) for character in text], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.vocabulary[token] for token in tokens.tolist())


def text(*, path: str, context: int = 128, test_fraction: float = 0.1) -> Splits:
    """Loads any UTF-8 file; its end is the test split.

    A relative path is searched in the current directory, then in the data directories.
    """
    file = next((folder / path for folder in [Path(), *data_dirs()] if (folder / path).is_file()), None)
    if file is None:
        searched = ", ".join(str(folder) for folder in [Path.cwd(), *data_dirs()])
        raise NotFound(f"path: there is no file {path} in {searched}")
    return _splits(file.stem, file.read_bytes(), file, context, test_fraction)


def tinyshakespeare(*, context: int = 128, download: bool = False, progress: Progress | None = None) -> Splits:
    """Loads tinyshakespeare (1.1 MB); the last tenth is the test split. ``download``: download it if not found."""
    file = next(existing_paths([SHAKESPEARE, "tinyshakespeare/input.txt"]), None)
    if file is None and download:
        file = fetch(SHAKESPEARE_URL, cache_dir() / SHAKESPEARE, SHAKESPEARE_CHECKSUM, progress=progress)
    if file is None:
        remedy = "load it with download=True, which downloads 1.1 MB"
        raise not_found("tinyshakespeare", SHAKESPEARE, remedy)
    with file.open("rb") as opened:
        data = verify(read_bounded(opened, SHAKESPEARE_BYTES, file), file, SHAKESPEARE_CHECKSUM)
    return _splits("tinyshakespeare", data, file, context, 0.1)


def _splits(name: str, data: bytes, file: Path, context: int, test_fraction: float) -> Splits:
    if not 0 < test_fraction < 1:
        raise InvalidArgument(f"test_fraction: {test_fraction} is not between 0 and 1")
    try:
        codes = _codes(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"path: {file} is not UTF-8 text ({error})") from error
    present, tokens = np.unique(codes, return_inverse=True)
    vocabulary, cut = "".join(map(chr, present.tolist())), round(len(tokens) * (1 - test_fraction))
    train, test = (
        TextData(f"{name}/{split}", part, vocabulary, context=context)
        for split, part in (("train", tokens[:cut]), ("test", tokens[cut:]))
    )
    return Splits(train, test)


def _codes(characters: str) -> Tokens:
    """The Unicode code points of a string."""
    return np.frombuffer(characters.encode("utf-32-le"), "<u4").astype(np.uint32)
