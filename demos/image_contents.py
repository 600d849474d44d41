"""Contents of an image in an OCI archive, as far as a release reports and checks them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import tarfile
from typing import Any

from demos.images import BASE_DIGEST

SET_ID = 0o6000
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""Names in a layer that hide a file, or all of a folder, of lower layers."""
PYTHON = re.compile(r"[^/]+\.dist-info/METADATA$")
DEBIAN = re.compile(r"var/lib/dpkg/status(\.d/[^/]+)?$")
RELEASE = "usr/lib/os-release"


@dataclasses.dataclass(frozen=True)
class Image:
    """An image: its digest, its base's, its configuration, and some files of its joined layers.

    `base` is empty if the image does not name it; `set_id`: paths of files with a set-user or
    set-group bit; `texts`: content by path of the files that describe packages and the
    distribution.
    """

    digest: str
    base: str
    config: dict[str, Any]
    set_id: list[str]
    texts: dict[str, str]


def read_image(path: pathlib.Path) -> Image:
    """Read the only image of an OCI archive."""
    digest, manifest = read_manifest(path)
    files: dict[str, tuple[bool, bytes | None]] = {}  # set-id, content
    with tarfile.open(path) as archive:
        config = json.loads(_content(archive, blob(manifest["config"]["digest"])))
        for layer in manifest["layers"]:
            hidden, present, noted = set(), set(), {}
            content = archive.extractfile(blob(layer["digest"]))
            with tarfile.open(fileobj=content, mode="r|*") as members:
                for member in members:
                    name = member.name.removeprefix("./")
                    parent, _, last = name.rpartition("/")
                    if last == OPAQUE:
                        hidden.add(parent)
                    elif last.startswith(WHITEOUT):
                        hidden.add(f"{parent}/{last.removeprefix(WHITEOUT)}".lstrip("/"))
                    else:
                        present.add(name)
                        if note := _note(members, member, name):
                            noted[name] = note
            lower = {
                name: note
                for name, note in files.items()
                if name not in present and not hidden & {name, *parents(name)}
            }
            files = lower | noted
    return Image(
        digest,
        manifest.get("annotations", {}).get(BASE_DIGEST, ""),
        config.get("config", {}),
        sorted(name for name, (set_id, _) in files.items() if set_id),
        {name: text.decode() for name, (_, text) in sorted(files.items()) if text is not None},
    )


def _note(
    archive: tarfile.TarFile, member: tarfile.TarInfo, name: str
) -> tuple[bool, bytes | None] | None:
    set_id = bool(member.mode & SET_ID) and (member.isfile() or member.islnk())
    described = name == RELEASE or PYTHON.search(name) or DEBIAN.fullmatch(name)
    file = archive.extractfile(member) if described and member.isfile() else None
    return (set_id, file.read() if file else None) if set_id or file else None


def read_manifest(path: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """Read the digest and the manifest of an OCI archive's only image."""
    with tarfile.open(path) as archive:
        (entry,) = json.loads(_content(archive, "index.json"))["manifests"]
        return entry["digest"], json.loads(_content(archive, blob(entry["digest"])))


def blob(of: str) -> str:
    """Path of a digest's content in a layout."""
    return f"blobs/{of.replace(':', '/')}"


def parents(name: str) -> list[str]:
    """List the folders that a path lies in."""
    return [str(folder) for folder in pathlib.PurePosixPath(name).parents][:-1]


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, name
    return file.read()
