"""Keys and texts in a directory: what JAX's coordination service does, for processes without it.

A key is a file. It is written under another name and then linked, so that it is set whole, and
once, even if its writer is killed meanwhile. What is set outlives the process that set it. One
machine only.
"""

import contextlib
import os
import pathlib
import struct
import time
import urllib.parse

from hetjax import whole

_LOOK_SECS = 0.005
_NUMBER = struct.Struct("<q")


class FileStore:
    """The part of the interface of JAX's client that `key_value_store` uses.

    Args:
        directory: that all processes have; there is nothing else in it.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self._directory = pathlib.Path(directory)

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        """Sets a key.

        Raises:
            FileExistsError: it is set, and may not be overwritten.
            OSError: there is no room in the directory, or it is gone.
        """
        put = os.replace if allow_overwrite else os.link
        try:
            with whole.written(self._path(key), put) as new:
                new.write_text(text)
        except OSError as error:  # one that says nothing of the file's other name
            raise OSError(error.errno, error.strerror, str(self._directory)) from None

    def key_value_try_get(self, key: str) -> str:
        """Its text.

        Raises:
            KeyError: it is not set; says NOT_FOUND, as JAX does.
        """
        try:
            return self._path(key).read_text()
        except FileNotFoundError:
            raise KeyError(f"NOT_FOUND: {key}") from None

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        """All keys that begin so, with their texts."""
        found = []
        for name in os.listdir(self._directory):
            key = urllib.parse.unquote(name)
            if key.startswith(prefix) and not name.startswith("."):
                with contextlib.suppress(KeyError):  # removed meanwhile
                    found.append((key, self.key_value_try_get(key)))
        return found

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """Its text, as soon as it is set.

        Raises:
            TimeoutError: it was not in time; says DEADLINE_EXCEEDED, as JAX does.
        """
        ends = time.monotonic() + milliseconds / 1000
        while True:
            try:
                return self.key_value_try_get(key)
            except KeyError:
                if time.monotonic() >= ends:
                    raise TimeoutError(f"DEADLINE_EXCEEDED: {key}") from None
            time.sleep(_LOOK_SECS)

    def key_value_increment(self, key: str, amount: int) -> int:
        """Adds to a counter; what others add at the same time may be in the value, too."""
        file = os.open(self._path(key), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, _NUMBER.pack(amount))
            added = os.pread(file, os.fstat(file).st_size, 0)
        finally:
            os.close(file)
        return sum(number for (number,) in _NUMBER.iter_unpack(added))

    def key_value_delete(self, key: str) -> None:
        """Takes it away; nothing happens where it is not set."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> pathlib.Path:
        return self._directory / urllib.parse.quote(key, safe="")
