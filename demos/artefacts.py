"""Write everything that a release publishes into dist/; nothing is pushed.

    make release                        charts, images, bills of materials, checksums
    python -m demos.artefacts --charts-only

    medha-*.tgz                     charts, and medha-*.oci.tar the same as OCI layouts
    medha-<image>.oci.tar           images as OCI archives
    medha-<image>.cdx.json          CycloneDX: the packages of Python and Debian in an image
    SHA256SUMS                      of all of it

The chart names the images in --registry by digest. An archive keeps its digest when it is pushed
unchanged (`skopeo copy --preserve-digests`, `oras cp --from-oci-layout`).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import venv
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from demos import images
from demos.image_contents import DEBIAN, PYTHON, RELEASE, Image, blob, read_image

from medha.cli.local_fleet.child_process import killed_with_parent

ROOT = images.ROOT
CHARTS = ("medha-crds", "medha")
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


def package_charts(
    folder: pathlib.Path, registry: str = "", digests: Mapping[str, str] | None = None
) -> list[pathlib.Path]:
    """Package the charts as Helm does, and again as OCI layouts; digests of all images become
    values of the chart."""
    paths = []
    for chart in CHARTS:
        source = ROOT / "charts" / chart
        about = yaml.safe_load((source / "Chart.yaml").read_text())
        with tempfile.TemporaryDirectory() as name:
            copy = shutil.copytree(source, pathlib.Path(name) / chart)
            if chart == "medha" and digests:
                values = copy / "values.yaml"
                values.write_text(named_by_digest(values.read_text(), registry, digests))
            run(helm(), "package", str(copy), "--destination", str(folder))
        path = folder / f"{chart}-{about['version']}.tgz"
        paths += [path, write_layout(path, about)]
    return paths


def named_by_digest(values: str, registry: str, digests: Mapping[str, str]) -> str:
    """Replace the registry and the tag in the text of the chart's values; comments stay."""
    replacements = {
        "registry: localhost": f"registry: {registry}",
        "tag: dev": 'tag: ""',
        "digests: {}": f"digests: {json.dumps(dict(sorted(digests.items())))}",
    }
    for line, other in replacements.items():
        before, default, after = values.partition(f"\n  {line}\n")
        if not default:
            raise Refused(f"values.yaml has no line {line!r}: must be the default of image")
        values = f"{before}\n  {other}\n{after}"
    return values


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


def write_image(target: str, device: str, folder: pathlib.Path) -> tuple[pathlib.Path, Image]:
    """Build an image, write it as an OCI archive and check it; returns its path and contents."""
    name, path = images.build(target, device), folder / f"medha-{target}.oci.tar"
    path.unlink(missing_ok=True)
    run(images.builder(), "push", "--quiet", name, f"oci-archive:{path}")
    image = read_image(path)
    check_image(path.name, image)
    return path, image


def check_image(name: str, image: Image) -> None:
    """Refuse an image that may become root, or that does not name its base by digest."""
    if image.set_id:
        raise Refused(f"{name} has programs that change their user: {', '.join(image.set_id)}")
    user = image.config.get("User", "").partition(":")[0]
    if not user.isdecimal() or int(user) == 0:
        raise Refused(f"{name} runs as user {user!r}: must be a number above 0; see USER")
    if not image.base.startswith("sha256:"):
        raise Refused(f"{name} has no {images.BASE_DIGEST}: build it with buildah or podman")


def write_bill(target: str, image: Image, folder: pathlib.Path) -> pathlib.Path:
    """Describe the packages in an image. Python's are read as if they were installed here."""
    path = folder / f"medha-{target}.cdx.json"
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=False)
        (site,) = pathlib.Path(name).glob("lib/python*/site-packages")
        for file, text in image.texts.items():
            if PYTHON.search(file):
                copy = site / pathlib.Path(file).parent.name / "METADATA"
                copy.parent.mkdir(exist_ok=True)
                copy.write_text(text)
        form = ("--output-reproducible", "--output-format", "JSON", "--output-file", str(path))
        run(sys.executable, "-m", "cyclonedx_py", "environment", *form, f"{name}/bin/python")
    bill = json.loads(path.read_text())
    bill["metadata"]["component"] = {
        "type": "container",
        "bom-ref": target,
        "name": f"medha-{target}",
        "version": image.digest,
        "hashes": [{"alg": "SHA-256", "content": image.digest.removeprefix("sha256:")}],
    }
    bill["components"] += debian_packages(image)
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n")
    return path


def debian_packages(image: Image) -> Iterator[dict[str, str]]:
    """Yield the installed packages of the image's distribution as components."""
    release = dict(
        line.split("=", 1) for line in image.texts.get(RELEASE, "").splitlines() if "=" in line
    )
    system, version = (release.get(key, "").strip('"') for key in ("ID", "VERSION_ID"))
    for path, text in image.texts.items():
        if not DEBIAN.fullmatch(path):
            continue
        for paragraph in text.split("\n\n"):
            fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, flags=re.M))
            # Distroless images list no status: what is there is installed.
            if "Package" in fields and fields.get("Status", "is installed").endswith(" installed"):
                about = {"arch": fields["Architecture"], "distro": f"{system}-{version}"}
                at = urllib.parse.quote(fields["Version"], safe=":~")
                purl = f"pkg:deb/{system}/{fields['Package']}@{at}?{urllib.parse.urlencode(about)}"
                yield {
                    "type": "library",
                    "bom-ref": purl,
                    "name": fields["Package"],
                    "version": fields["Version"],
                    "purl": purl,
                }


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
    parser.add_argument("--charts-only", action="store_true")
    arguments = parser.parse_args()
    folder: pathlib.Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        helm()
        paths, digests = [], {}
        if not arguments.charts_only:
            check_bases()
            for target in images.TARGETS:
                path, image = write_image(target, arguments.device, folder)
                paths += [path, write_bill(target, image, folder)]
                digests[target] = image.digest
        paths += package_charts(folder, arguments.registry, digests)
        paths.append(write_checksums(paths, folder))
    except (Refused, images.Unreachable) as error:
        sys.exit(str(error))
    for path in paths:
        print(f"{path.stat().st_size:>12} {path}")


if __name__ == "__main__":
    main()
