"""Reading compressed files as streams that notice when their data is cut short."""

import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import zstandard

BUFFER = 2**18
# Four bytes of zstd can stand for 128 KiB of text, so little of it is decompressed at a time.
_ZSTD_BYTES = 2**10
# What `zstd --long=31` needs, the most there is; memory is taken only if a file asks for it.
_ZSTD_WINDOW = 2**31
# What a decompressor raises for data that is cut short or damaged; gzip's own error is an OSError.
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


def decompressed(raw: BinaryIO, compression: str | None, advance: Callable[[int], None]) -> BinaryIO:
    """Returns the content of a file.

    Args:
      raw: the file.
      compression: ``gzip``, ``zstd`` or None.
      advance: called with bytes of ``raw`` that were read.
    """
    counted = _Counted(raw, advance)
    readers: dict[str | None, Callable[[io.RawIOBase], Any]] = {"gzip": _Gzip, "zstd": _Zstd}
    stream = readers.get(compression, lambda same: same)(counted)
    return cast(BinaryIO, io.BufferedReader(stream, BUFFER))


class _Counted(io.RawIOBase):
    """A readable file that tells how many bytes were read."""

    def __init__(self, raw: BinaryIO, advance: Callable[[int], None]):
        self._raw, self._advance = raw, advance

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves in the file."""
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        """Returns the position in the file."""
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)


class _Gzip(gzip.GzipFile):
    """Decompresses gzip; unlike Python's own, it takes an empty file for what it is, cut short."""

    def __init__(self, raw: io.RawIOBase):
        super().__init__(fileobj=cast(BinaryIO, raw))
        self._raw, self._begun = raw, False

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        count = super().readinto(buffer)
        if count == 0 and not self._begun and self._raw.tell() == 0:
            raise EOFError("the compressed data ends early")
        self._begun = True
        return count


class _Zstd(io.RawIOBase):
    """Decompresses zstd frames; unlike zstandard's own stream, it notices that a file was cut short."""

    def __init__(self, raw: io.RawIOBase):
        self._raw = io.BufferedReader(raw, BUFFER)
        self._frame: Any = None
        self._begun = False  # no file of zstd is empty
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        while not self._ready:
            data, self._rest = self._rest or self._raw.read(_ZSTD_BYTES), b""
            if not data:
                if self._frame is not None or not self._begun:
                    raise EOFError("the compressed data ends early")
                return 0
            self._begun = True
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
            self._ready = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
