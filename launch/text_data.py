"""Text as bytes (a vocabulary of 256): where it comes from, its digest, and microbatches that can be read from any position.

Imports no torch at the top, so that a missing file is reported before torch is loaded.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 256
HELD_OUT_SHARE = 0.05
HELD_OUT_MOST_BYTES = 200_000
STDLIB_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}


@dataclass(frozen=True)
class Text:
    """One text, split once: training bytes first, held-out bytes last.

    train, held_out: uint8 arrays `[bytes]`.
    sha256: digest of the whole text, before the split.
    """

    train: np.ndarray
    held_out: np.ndarray
    sha256: str

    @property
    def total_bytes(self) -> int:
        return len(self.train) + len(self.held_out)


def standard_library_files() -> list[Path]:
    """The Python standard library's own sources, top two levels, sorted and then shuffled with a fixed seed.

    Shuffled, so that the held-out end is not simply the modules whose names begin with z.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    packages = (folder for folder in root.iterdir() if folder.is_dir() and folder.name not in STDLIB_LEFT_OUT)
    files = [file for folder in (root, *packages) for file in folder.glob("*.py")]
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    random.Random(0).shuffle(files)
    return files


def load_text(files: list[Path] | None, context: int) -> Text:
    """Read the files in the order given (None: the Python standard library) and hold out the last 5 % (at most 200 kB).

    Raises:
        ValueError: a file cannot be read or is empty, or the text is too short for one sequence of context + 1 bytes
            in each of the two parts.
    """
    given = files is not None
    if not given:
        files = standard_library_files()
        if not files:
            raise ValueError(f"no Python sources in {sysconfig.get_paths()['stdlib']}; give a text with --data FILE")
    parts = []
    for file in files:
        try:
            parts.append(Path(file).read_bytes())
        except OSError as error:
            raise ValueError(f"--data {file}: {error.strerror}") from None
        if given and not parts[-1]:
            raise ValueError(f"--data {file}: no text in it")
    text = b"".join(parts)
    sequence = context + 1
    if len(text) < 2 * sequence:
        raise ValueError(
            f"--data has {len(text)} bytes; training and held-out part need one sequence of {sequence} bytes each "
            f"(--context {context} plus 1): give more text or a smaller --context"
        )
    held_out_bytes = max(sequence, min(int(len(text) * HELD_OUT_SHARE), HELD_OUT_MOST_BYTES))
    tokens = np.frombuffer(text, dtype=np.uint8)
    return Text(tokens[:-held_out_bytes], tokens[-held_out_bytes:], hashlib.sha256(text).hexdigest())


def microbatch(tokens: np.ndarray, context: int, size: int, seed: int, index: int, replica: int):
    """Microbatch number `index` of one data-parallel replica: a pure function of its arguments.

    Returns:
        (inputs, labels): int64 tensors `[size, context]`; labels are the inputs one byte later.
    """
    starts = np.random.default_rng((seed, index, replica)).integers(0, len(tokens) - context, size)
    return _sequences(tokens, starts, context)


def training_batches(tokens: np.ndarray, context: int, size: int, seed: int, replica: int, first: int) -> Iterator:
    """The endless microbatches of one replica from number `first` on.

    Every stage of a replica reads the same sequence, the first one its inputs and the last one its labels. In a pipeline
    without flushes the first stage is ahead of the last, so a process must keep one such iterator for the whole run.
    """
    index = first
    while True:
        yield microbatch(tokens, context, size, seed, index, replica)
        index += 1


def held_out_batches(tokens: np.ndarray, context: int, size: int, replica: int, replicas: int, count: int) -> Iterator:
    """`count` microbatches of this replica's share of the held-out sequences, which are spread evenly and always the same."""
    sequences = count * replicas * size
    starts = np.linspace(0, len(tokens) - context - 1, sequences).astype(np.int64)
    for index in range(count):
        first = (index * replicas + replica) * size
        yield _sequences(tokens, starts[first : first + size], context)


def _sequences(tokens: np.ndarray, starts: np.ndarray, context: int):
    import torch

    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
