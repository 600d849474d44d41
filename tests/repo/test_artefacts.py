"""Contents of a release, read back from the files that `make release` writes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from demos import artefacts, images

Layer = list[tuple[str, int]]
"""Names and modes; a name that begins with .wh. hides one of a lower layer."""


def archive(folder: Path, *layers: Layer) -> Path:
    """Write an OCI archive whose image has these layers."""
    contents = []
    for layer in layers:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as files:
            for name, mode in layer:
                member = tarfile.TarInfo(name)
                member.mode = mode
                files.addfile(member)
        contents.append(buffer.getvalue())
    entries = [artefacts.descriptor("application/vnd.oci.image.layer.v1.tar", c) for c in contents]
    manifest = json.dumps({"layers": entries}).encode()
    index = {"manifests": [artefacts.descriptor(artefacts.MANIFEST, manifest)]}
    files_by_name = {"index.json": json.dumps(index).encode()}
    files_by_name |= {artefacts.blob(artefacts.digest(c)): c for c in (*contents, manifest)}
    return artefacts.write_archive(folder / "image.oci.tar", files_by_name)


SU, OTHER = ("usr/bin/su", 0o4755), ("usr/bin/wall", 0o2755)


@pytest.mark.parametrize(
    ("layers", "left"),
    [
        ([[SU, OTHER, ("bin/sh", 0o755)]], ["usr/bin/su", "usr/bin/wall"]),
        ([[SU, OTHER], [("usr/bin/.wh.su", 0)]], ["usr/bin/wall"]),
        ([[SU, OTHER], [("usr/bin/.wh..wh..opq", 0)]], []),
        ([[SU, OTHER], [("usr/.wh.bin", 0)]], []),
        ([[SU], [("usr/bin/su", 0o755)]], []),
        ([[SU], [("usr/bin/.wh.su", 0)], [SU]], ["usr/bin/su"]),
        ([[SU], [SU, ("usr/bin/.wh..wh..opq", 0)]], ["usr/bin/su"]),
        ([[("./usr/bin/su", 0o4755)], [("./usr/bin/.wh.su", 0)]], []),
    ],
)
def test_files_that_change_the_user_are_those_of_the_joined_layers(
    tmp_path: Path, layers: list[Layer], left: list[str]
) -> None:
    assert artefacts.set_id_files(archive(tmp_path, *layers)) == left


def test_the_images_remove_such_files_in_the_stage_that_all_of_them_share(house: Path) -> None:
    text = (house / "Dockerfile").read_text()
    base = text.partition("AS base\n")[2].partition("\nFROM ")[0]
    assert "find / -xdev -type f -perm /6000 -delete" in base
    for target in images.TARGETS:
        assert f"FROM base AS {target}\n" in text


def test_a_base_without_a_digest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDHA_IMAGE_BUILDER", "podman")
    monkeypatch.setenv("MEDHA_BUILDER_IMAGE", f"python@sha256:{'a' * 64}")
    monkeypatch.setenv("MEDHA_BASE_IMAGE", "python:3.12-slim")
    with pytest.raises(artefacts.Refused, match="must be pinned by digest"):
        artefacts.check_bases()
    monkeypatch.delenv("MEDHA_BASE_IMAGE")
    with pytest.raises(artefacts.Refused, match="MEDHA_BASE_IMAGE is missing"):
        artefacts.check_bases()
    monkeypatch.setenv("MEDHA_BASE_IMAGE", f"python:3.12-slim@sha256:{'a' * 64}")
    artefacts.check_bases()
    monkeypatch.setenv("MEDHA_IMAGE_BUILDER", "docker")
    with pytest.raises(artefacts.Refused, match="need buildah or podman"):
        artefacts.check_bases()


def test_a_release_without_images_holds_charts_bills_and_checksums(
    house: Path, helm: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "demos.artefacts", "--charts-only", f"--folder={tmp_path}"]
    environment = {**os.environ, "PATH": f"{helm.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=house, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *(f"{chart}-0.1.0.{end}" for chart in artefacts.CHARTS for end in ("tgz", "oci.tar")),
        *(f"medha-{target}.cdx.json" for target in images.TARGETS),
        "SHA256SUMS",
    }
    sums = dict(
        line.split("  ")[::-1] for line in (tmp_path / "SHA256SUMS").read_text().split("\n")[:-1]
    )
    assert sums == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in names - {"SHA256SUMS"}
    }
    for chart in artefacts.CHARTS:
        of, manifest = artefacts.read_manifest(tmp_path / f"{chart}-0.1.0.oci.tar")
        with tarfile.open(tmp_path / f"{chart}-0.1.0.oci.tar") as layout:
            for part in (manifest["config"], *manifest["layers"], {"digest": of}):
                file = layout.extractfile(artefacts.blob(part["digest"]))
                assert file is not None and artefacts.digest(file.read()) == part["digest"]
        (layer,) = manifest["layers"]
        assert layer["digest"] == f"sha256:{sums[f'{chart}-0.1.0.tgz']}"
        assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    for target in images.TARGETS:
        bill = json.loads((tmp_path / f"medha-{target}.cdx.json").read_text())
        assert bill["bomFormat"] == "CycloneDX"
        described = {part["name"].lower(): part for part in bill["components"]}
        locked = (house / f"requirements/{target}.txt").read_text().splitlines()
        wanted = {line.partition("==")[0] for line in locked if line[:1].isalnum()}
        assert {name.replace("_", "-") for name in described} == wanted


def test_images_are_named_by_digest(tmp_path: Path) -> None:
    of = f"sha256:{'a' * 64}"
    path = artefacts.write_digests({"router": of}, "r.example/medha", tmp_path)
    assert path.read_text() == f"router:\n  image: r.example/medha/medha-router@{of}\n"
