"""Faults that several checks find, raised together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from medha.errors import UserError, UserErrors


class Faults:
    """Collects the UserErrors of independent checks."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    @contextlib.contextmanager
    def collect(self, resource: str = "") -> Iterator[None]:
        """Collect an error of the block, under the name of a `resource` if one is given."""
        try:
            yield
        except UserErrors as several:
            self.add(*several.errors, resource=resource)
        except UserError as error:
            self.add(error, resource=resource)

    def add(self, *errors: UserError, resource: str = "") -> None:
        prefixed = (UserError(f"{resource}: {error}") for error in errors)
        self._errors += prefixed if resource else errors

    def raise_all(self) -> None:
        """Raise the error if there is one, UserErrors if there are several."""
        if len(self._errors) > 1:
            raise UserErrors(self._errors)
        if self._errors:
            raise self._errors[0]
