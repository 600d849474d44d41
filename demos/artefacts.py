"""Write everything that a release publishes into dist/; nothing is pushed.

    make release                        charts, images, bills of materials, checksums
    python -m demos.artefacts --charts-only

    medha-*.tgz                     charts, and medha-*.oci.tar the same as OCI layouts
    medha-<image>.oci.tar           images as OCI archives
    values-digests.yaml             values of the chart that name the images by digest
    medha-<image>.cdx.json          CycloneDX: the Python packages that an image locks
    SHA256SUMS                      of all of it

An archive keeps its digest when it is pushed unchanged (`skopeo copy --preserve-digests`,
`oras cp --from-oci-layout`).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from typing import Any

import yaml
from demos import images

from medha.cli.local_fleet.child_process import killed_with_parent

ROOT = images.ROOT
CHARTS = ("medha-crds", "medha")
SET_ID = 0o6000
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""Names in a layer that hide a file, or all of a folder, of lower layers."""
LAYOUT = {"imageLayoutVersion": "1.0.0"}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
HELM = "application/vnd.cncf.helm."


class Refused(Exception):
    """A part of the release cannot be written here; the message has the remedy."""


def helm() -> str:
    """Find Helm on the path or among the programs of Kubernetes."""
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    program = shutil.which("helm") or shutil.which("helm", path=assets)
    if program is None:
        raise Refused("helm is missing, which packages the charts: install Helm 3")
    return program


def package_charts(folder: pathlib.Path) -> list[pathlib.Path]:
    """Package the charts as Helm does, and again as OCI layouts."""
    paths = []
    for chart in CHARTS:
        source = ROOT / "charts" / chart
        about = yaml.safe_load((source / "Chart.yaml").read_text())
        run(helm(), "package", str(source), "--destination", str(folder))
        path = folder / f"{chart}-{about['version']}.tgz"
        paths += [path, write_layout(path, about)]
    return paths


def write_layout(chart: pathlib.Path, about: dict[str, Any]) -> pathlib.Path:
    """Write a packaged chart as an OCI layout, as `helm push` stores it."""
    layer, config = chart.read_bytes(), json.dumps(about).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(f"{HELM}config.v1+json", config),
            "layers": [descriptor(f"{HELM}chart.content.v1.tar+gzip", layer)],
        }
    ).encode()
    named = {"org.opencontainers.image.ref.name": about["version"]}
    entry = {**descriptor(MANIFEST, manifest), "annotations": named}
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}).encode()
    files = {"oci-layout": json.dumps(LAYOUT).encode(), "index.json": index}
    files |= {blob(digest(data)): data for data in (layer, config, manifest)}
    return write_archive(chart.with_suffix(".oci.tar"), files)


def write_archive(path: pathlib.Path, files: Mapping[str, bytes]) -> pathlib.Path:
    """Write a tar archive of files, given by name."""
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def descriptor(kind: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest(data), "size": len(data)}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def blob(of: str) -> str:
    """Path of a digest's content in a layout."""
    return f"blobs/{of.replace(':', '/')}"


def check_bases() -> None:
    """Refuse a base image that a later build may find changed."""
    if images.able_builder() not in ("buildah", "podman"):
        raise Refused(
            "images need buildah or podman, which write OCI archives: install one, or leave the "
            "images out with --charts-only"
        )
    for name in images.BASES:
        given = images.given_base(name)
        if given is not None and "@sha256:" not in given and not given.startswith("localhost/"):
            raise Refused(
                f"MEDHA_{name}_IMAGE is {given}: must be pinned by digest; use NAME@sha256:…"
            )
        if given is None and images.able_builder() != "buildah":
            raise Refused(
                f"MEDHA_{name}_IMAGE is missing: must name the base by digest; use NAME@sha256:…"
            )


def write_image(target: str, device: str, folder: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Build an image and write it as an OCI archive; returns its path and digest."""
    name, path = images.build(target, device), folder / f"medha-{target}.oci.tar"
    path.unlink(missing_ok=True)
    run(images.builder(), "push", "--quiet", name, f"oci-archive:{path}")
    if programs := set_id_files(path):
        raise Refused(f"{path.name} has programs that change their user: {', '.join(programs)}")
    return path, read_manifest(path)[0]


def read_manifest(path: pathlib.Path) -> tuple[str, dict[str, Any]]:
    """Read the digest and the manifest of an OCI archive's only image."""
    with tarfile.open(path) as archive:
        (entry,) = json.loads(_content(archive, "index.json"))["manifests"]
        return entry["digest"], json.loads(_content(archive, blob(entry["digest"])))


def set_id_files(path: pathlib.Path) -> list[str]:
    """List the files of an OCI archive's file system that have a set-user or set-group bit."""
    marked: set[str] = set()
    _, manifest = read_manifest(path)
    with tarfile.open(path) as archive:
        for layer in manifest["layers"]:
            hidden, present, marked_here = set(), set(), set()
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
                        if member.mode & SET_ID and (member.isfile() or member.islnk()):
                            marked_here.add(name)
            lower = {name for name in marked - present if not hidden & {name, *parents(name)}}
            marked = lower | marked_here
    return sorted(marked)


def parents(name: str) -> list[str]:
    """List the folders that a path lies in."""
    return [str(folder) for folder in pathlib.PurePosixPath(name).parents][:-1]


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, name
    return file.read()


def write_bill(target: str, folder: pathlib.Path) -> pathlib.Path:
    """Describe the Python packages that an image locks, with their hashes."""
    path = folder / f"medha-{target}.cdx.json"
    tool = (sys.executable, "-m", "cyclonedx_py", "requirements")
    form = ("--output-reproducible", "--output-format", "JSON", "--output-file", str(path))
    locked = ROOT / "requirements" / f"{target}.txt"
    run(*tool, "--pyproject", str(ROOT / "pyproject.toml"), *form, str(locked))
    return path


def write_digests(digests: dict[str, str], registry: str, folder: pathlib.Path) -> pathlib.Path:
    """Write values of the chart that name each image by its digest."""
    path = folder / "values-digests.yaml"
    values = {
        target: {"image": f"{registry}/medha-{target}@{digest}"}
        for target, digest in digests.items()
    }
    path.write_text(yaml.safe_dump(values))
    return path


def write_checksums(paths: list[pathlib.Path], folder: pathlib.Path) -> pathlib.Path:
    """Write checksums as `sha256sum --check` reads them."""
    lines = []
    for path in sorted(paths):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    target = folder / "SHA256SUMS"
    target.write_text("".join(lines))
    return target


def run(*command: str) -> None:
    """Run a program; exits with its last output if it fails."""
    done = subprocess.run(killed_with_parent(*command), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="demos.artefacts", description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--registry", default="localhost", help="where the images will be pushed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--images", nargs="*", default=list(images.TARGETS))
    parser.add_argument("--charts-only", action="store_true")
    arguments = parser.parse_args()
    folder: pathlib.Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        paths = package_charts(folder)
        if not arguments.charts_only:
            check_bases()
            digests = {}
            for target in arguments.images:
                path, digests[target] = write_image(target, arguments.device, folder)
                paths.append(path)
            paths.append(write_digests(digests, arguments.registry, folder))
        paths += [write_bill(target, folder) for target in images.TARGETS]
        paths.append(write_checksums(paths, folder))
    except (Refused, images.Unreachable) as error:
        sys.exit(str(error))
    for path in paths:
        print(f"{path.stat().st_size:>12} {path}")


if __name__ == "__main__":
    main()
