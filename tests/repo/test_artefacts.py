"""Contents of a release, read back from the files that `make release` writes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from demos import artefacts, images
from demos.image_contents import Image, blob, read_image, read_manifest

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
    config = json.dumps({"config": {"User": "65532:65532"}}).encode()
    described = artefacts.descriptor("application/vnd.oci.image.config.v1+json", config)
    manifest = json.dumps({"config": described, "layers": entries}).encode()
    index = {"manifests": [artefacts.descriptor(artefacts.MANIFEST, manifest)]}
    files_by_name = {"index.json": json.dumps(index).encode()}
    files_by_name |= {blob(artefacts.digest(c)): c for c in (*contents, config, manifest)}
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
    assert read_image(archive(tmp_path, *layers)).set_id == left


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


def test_a_release_without_images_holds_charts_and_checksums(
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
        of, manifest = read_manifest(tmp_path / f"{chart}-0.1.0.oci.tar")
        with tarfile.open(tmp_path / f"{chart}-0.1.0.oci.tar") as layout:
            for part in (manifest["config"], *manifest["layers"], {"digest": of}):
                file = layout.extractfile(blob(part["digest"]))
                assert file is not None and artefacts.digest(file.read()) == part["digest"]
        (layer,) = manifest["layers"]
        assert layer["digest"] == f"sha256:{sums[f'{chart}-0.1.0.tgz']}"
        assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"


DIGEST = f"sha256:{'a' * 64}"
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13
Description: GNU C Library
 Version: 7 of the description

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: tzdata
Status: install ok installed
Architecture: all
Version: 1:2025b-0
"""


def image(**changes: Any) -> Image:
    site = "opt/medha/lib/python3.11/site-packages"
    texts = {
        f"{site}/msgspec-0.22.0.dist-info/METADATA": "Name: msgspec\nVersion: 0.22.0\n",
        f"{site}/kit/_vendor/tomli-2.dist-info/METADATA": "Name: tomli\nVersion: 2\n",
        "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": STATUS,
        "var/lib/dpkg/status.d/base": "Package: base\nArchitecture: all\nVersion: 12\n",
    }
    right = Image(
        digest=DIGEST, base=DIGEST, config={"User": "65532:65532"}, set_id=[], texts=texts
    )
    return dataclasses.replace(right, **changes)


def test_a_bill_names_the_packages_in_the_image(tmp_path: Path) -> None:
    text = artefacts.write_bill("router", image(), tmp_path).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert bill["metadata"]["component"]["version"] == DIGEST
    assert sorted(part["purl"] for part in bill["components"]) == [
        "pkg:deb/debian/base@12?arch=all&distro=debian-12",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:deb/debian/tzdata@1:2025b-0?arch=all&distro=debian-12",
        "pkg:pypi/msgspec@0.22.0",
        "pkg:pypi/tomli@2",
    ]
    assert artefacts.write_bill("router", image(), tmp_path).read_text() == text


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"set_id": ["usr/bin/su"]}, "change their user: usr/bin/su"),
        ({"config": {}}, "user '': must be a number above 0"),
        ({"config": {"User": "0:0"}}, "user '0': must be a number above 0"),
        ({"config": {"User": "medha"}}, "user 'medha': must be a number above 0"),
        ({"base": ""}, "has no org.opencontainers.image.base.digest"),
    ],
)
def test_an_image_that_may_become_root_or_hides_its_base_is_refused(
    changes: dict[str, Any], refusal: str
) -> None:
    artefacts.check_image("router.oci.tar", image())
    with pytest.raises(artefacts.Refused, match=refusal):
        artefacts.check_image("router.oci.tar", image(**changes))


def test_an_image_reports_its_last_files_that_describe_packages(tmp_path: Path) -> None:
    path = "var/lib/dpkg/status"
    layers: list[Layer] = [[(path, 0o644)], [("var/lib/dpkg/.wh.status", 0)]]
    assert [*read_image(archive(tmp_path, *layers[:1])).texts] == [path]
    assert [*read_image(archive(tmp_path, *layers)).texts] == []


def test_a_published_chart_names_the_images_by_digest(helm: Path, tmp_path: Path) -> None:
    digests = {
        target: f"sha256:{name * 64}" for target, name in zip(images.TARGETS, "abc", strict=True)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(helm.parent), prepend=os.pathsep)
        _, _, path, _ = artefacts.package_charts(tmp_path, "r.example/medha", digests)
    command = [str(helm), "template", "medha", str(path), "--kube-version=1.36.0"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    named = set(re.findall(r'"(\S*/medha-\w+[:@][^"]*)"', text))
    assert named == {f"r.example/medha/medha-{name}@{digest}" for name, digest in digests.items()}
    mirrored = subprocess.run(
        [*command, "--set-string=image.tag=2,image.registry=mirror.example"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    named = set(re.findall(r'"(\S*/medha-\w+[:@][^"]*)"', mirrored))
    assert named == {f"mirror.example/medha-{name}:2" for name in digests}


def test_values_whose_image_is_not_the_default_are_refused() -> None:
    with pytest.raises(artefacts.Refused, match="tag: dev"):
        artefacts.named_by_digest("image:\n  registry: localhost\n  tag: x\n", "r", {})
