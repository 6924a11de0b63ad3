# SPDX-License-Identifier: Apache-2.0
"""The one exception that a user meets: what is wrong, where, the limit, and the way out, in one line."""

from __future__ import annotations

# What a file that is not as it should be can raise in the code that reads it, whatever the parser: every reader turns
# all of these into one line. RecursionError: JSON nested deeper than Python's stack.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class InputError(ValueError):
    """An input, a setting or a machine that a command cannot work with.

    The command line prints it as one line and exits with 2.
    """

    def __init__(self, what: str, *, where: str, limit: str, way_out: str) -> None:
        self.what, self.where, self.limit, self.way_out = what, where, limit, way_out
        super().__init__(" ".join(f"{where}: {what}; {limit}; {way_out}".split()))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.limit, self.way_out))


def _rebuild(kind: type[InputError], what: str, where: str, limit: str, way_out: str) -> InputError:
    return kind(what, where=where, limit=limit, way_out=way_out)
