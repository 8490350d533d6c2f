"""What all commands share: a parser whose mistakes are user errors, and types of its words."""

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from cplm_jax.config import check_local_path, check_path
from cplm_jax.errors import UserError, nearest


def path_word(word: str) -> str:
    """Returns a path as it was given. Raises ``ArgumentTypeError`` if it can name no file here."""
    return _checked(word, check_local_path)


def path_or_url_word(word: str) -> str:
    """Returns a path or URL as it was given. Raises ``ArgumentTypeError`` if it can name no file."""
    return _checked(word, check_path)


def _checked(word: str, check: Callable[[str], str]) -> str:
    try:
        return check(word)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{word!r}: {e}") from e


def number_between(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from ``low`` to ``high``."""

    def parse(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{word!r}: expected a whole number from {low} to {high}")
        return value

    return parse


class CommandParser(argparse.ArgumentParser):
    """Reports mistakes as :class:`UserError`, with the nearest option."""

    def __init__(self, name: str, description: str):
        super().__init__(prog=f"cplm {name}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises :class:`UserError`, where argparse would print its usage and exit."""
        raise UserError(f"{self.prog}: {message} (--help lists every option)")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses all arguments. Raises :class:`UserError` for one that does not exist."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in arguments:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                self.error(f"unknown option {option!r}{nearest(option, known)}")
        return self.parse_args(list(arguments))
