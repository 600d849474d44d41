"""Names of full pages: a chain of hashes, so that equal prefixes have equal names.

    h[0] = H(salt, tokens of page 0)      h[i] = H(h[i-1], tokens of page i)

The salt binds tenant and model, so one tenant can neither use nor probe another's pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16


def salt_of(model: str, tenant: str, secret: bytes = b"") -> bytes:
    """The chain's first link for a tenant of a model."""
    text = f"{len(model)}:{model}{len(tenant)}:{tenant}".encode()
    return hashlib.blake2b(text, digest_size=HASH_BYTES, key=secret[:64]).digest()


def next_hash(previous: bytes, page: npt.NDArray[np.int32]) -> bytes:
    """Name of the page whose tokens are `page`, following `previous` (or the salt)."""
    digest = hashlib.blake2b(previous, digest_size=HASH_BYTES)
    digest.update(np.ascontiguousarray(page, dtype="<i4").tobytes())
    return digest.digest()


def chain(tokens: npt.NDArray[np.int32], page_tokens: int, salt: bytes) -> Iterator[bytes]:
    """Names of every full page of `tokens`, in order; a page that is not full has none."""
    link = salt
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        link = next_hash(link, tokens[start : start + page_tokens])
        yield link
