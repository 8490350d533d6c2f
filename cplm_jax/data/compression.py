"""Reading compressed files as streams that notice when their data is cut short."""

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import zstandard

from cplm_jax.data.files import SourceFile, open_file
from cplm_jax.errors import UserError, first_line

BUFFER = 2**18
# A few compressed bytes can stand for very many, so few are decompressed at a time: four bytes of zstd
# for 128 KiB, one byte of gzip for 1 KiB.
_AT_A_TIME = 2**10
# What `zstd --long=31` needs, the most there is; memory is taken only if a file asks for it.
_ZSTD_WINDOW = 2**31
# What a decompressor raises for data that is cut short or damaged.
DAMAGED = (EOFError, zlib.error, zstandard.ZstdError)


def decompressed(raw: io.RawIOBase, compression: str | None) -> BinaryIO:
    """Returns the content of a file.

    Args:
      raw: the file.
      compression: ``gzip``, ``zstd`` or None.
    """
    makers: dict[str, Callable[[], Any]] = {
        "gzip": lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS),
        "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    }
    stream = raw if compression is None else _Frames(raw, makers[compression])
    return cast(BinaryIO, io.BufferedReader(stream, BUFFER))


@contextmanager
def opened(file: SourceFile, advance: Callable[[int], None] = lambda _: None) -> "Iterator[Counted]":
    """Opens a file for reading and closes it in the end.

    Args:
      file: the file.
      advance: called with bytes that were read.

    Raises:
      UserError: if an OSError leaves the block, since the file cannot be opened or read.
    """
    try:
        with open_file(file) as stream:
            yield Counted(stream, advance)
    except OSError as e:  # local or remote: permission, a lost mount
        raise UserError(f"{file.path}: cannot read it: {e.strerror or first_line(e)}") from e


class Counted(io.RawIOBase):
    """A readable file that tells how many bytes were read.

    Args:
      raw: the file.
      advance: called with bytes of ``raw`` that were read.

    Attributes:
      error: what reading raised, whatever a library above makes of it: a failure of the disk or network,
        which is no fault of the data.
    """

    def __init__(self, raw: BinaryIO, advance: Callable[[int], None]):
        self._raw, self._advance = raw, advance
        self.error: OSError | None = None

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves in the file."""
        return self._noticing(self._raw.seek, offset, whence)

    def tell(self) -> int:
        """Returns the position in the file."""
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        data = self._noticing(self._raw.read, len(buffer))
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)

    def _noticing(self, call: Callable[..., Any], *arguments: int) -> Any:
        try:
            return call(*arguments)
        except OSError as e:
            self.error = e
            raise


class _Frames(io.RawIOBase):
    """Decompresses frames of zstd or members of gzip, one after the other.

    Unlike the libraries' own streams, it gives all that comes before a damaged place, and takes a file that
    was cut short, an empty one too, for what it is.

    Args:
      raw: the file.
      new: makes a decompressor of a frame.
    """

    def __init__(self, raw: io.RawIOBase, new: Callable[[], Any]):
        self._raw, self._new = io.BufferedReader(raw, BUFFER), new
        self._frame: Any = None
        self._begun = False
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        while not self._ready:
            data, self._rest = self._rest or self._raw.read(_AT_A_TIME), b""
            if not data:
                if self._frame is not None or not self._begun:
                    raise EOFError("the compressed data ends early")
                return 0
            if self._frame is None:
                if self._begun:  # gzip may be padded
                    data = data.lstrip(b"\0")
                    if not data:
                        continue
                self._frame = self._new()
            self._begun = True
            self._ready = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
