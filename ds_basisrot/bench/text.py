"""Text as bytes for training at small size: the Python standard library's own sources or a file, split once, and sequences from it."""

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_SHARE = 0.05
HELD_OUT_MOST_BYTES = 200_000
STDLIB_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}


@dataclass(frozen=True)
class Text:
    """A text, training part first, held-out part last.

    Attributes:
        train, held_out: uint8 `[bytes]`.
        source: where it is from, in words.
        sha256: digest of the whole text.
    """

    train: Tensor
    held_out: Tensor
    source: str
    sha256: str

    def training_sequences(self, count: int, context: int, seed: int) -> Tensor:
        """`[count, context + 1]` bytes, uint8, from random places."""
        generator = torch.Generator().manual_seed(seed)
        return _windows(self.train, torch.randint(len(self.train) - context, (count,), generator=generator), context)

    def held_out_sequences(self, count: int, context: int) -> Tensor:
        """`[count, context + 1]` bytes, uint8, evenly spread over the held-out part: always the same."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, count, dtype=torch.float64)
        return _windows(self.held_out, starts.long(), context)


def read_text(file: Path | None, context: int) -> Text:
    """The text in `file` (None: the Python standard library), of which the last 5 % (at most 200 kB) are held out.

    Raises:
        ValueError: it cannot be read, or either part is shorter than a sequence of context + 1 bytes.
    """
    if file is None:
        source, files = "Python standard library", standard_library_files()
    else:
        source, files = str(file), [file]
    try:
        text = b"".join(each.read_bytes() for each in files)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
    if len(text) < 2 * (context + 1):
        raise ValueError(
            f"{source} has {len(text)} bytes; its training part and its held-out part need {context + 1} each, one more than the context: "
            "give a longer text or a smaller context"
        )
    held_out = max(context + 1, min(int(len(text) * HELD_OUT_SHARE), HELD_OUT_MOST_BYTES))
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Text(whole[:-held_out], whole[-held_out:], source, hashlib.sha256(text).hexdigest())


def standard_library_files() -> list[Path]:
    """The standard library's own sources, its top two levels, sorted and then shuffled in a fixed way.

    Shuffled, because the modules whose names begin with z would be held out otherwise.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = [root, *(path for path in root.iterdir() if path.is_dir() and path.name not in STDLIB_LEFT_OUT)]
    files = sorted((file for folder in folders for file in folder.glob("*.py")), key=lambda file: file.relative_to(root).as_posix())
    random.Random(0).shuffle(files)
    return files


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(context + 1)]
