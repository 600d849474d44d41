#!/bin/sh
# Makes the base of Medha's images where no registry can be asked: Debian with Python, from the
# package sources of this machine.    tests/cluster/base_image.sh NAME [PACKAGE...]
# Needs root, debootstrap and buildah. About 60 MB are downloaded.
set -eu
name=${1:?"the name of the image, e.g. localhost/medha-base:dev"}
shift
packages=$(IFS=,; echo "python3,python3-venv,ca-certificates${*:+,$*}")
for program in debootstrap buildah; do
    command -v "$program" > /dev/null || { echo "$program is missing: install it" >&2; exit 2; }
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mirror=$(sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' /etc/apt/sources.list \
    /etc/apt/sources.list.d/* 2> /dev/null | head -n 1)
debootstrap --variant=minbase --include="$packages" \
    "$suite" "$folder/debian" ${mirror:+"$mirror"} > "$folder/log" \
    || { tail -n 20 "$folder/log" >&2; exit 1; }
rm -rf "$folder"/debian/var/cache/apt/archives/*.deb "$folder"/debian/var/lib/apt/lists/*
tar -C "$folder/debian" -cf "$folder/debian.tar" .
container=$(buildah from scratch)
buildah add -q "$container" "$folder/debian.tar" / > /dev/null
buildah commit -q "$container" "$name" > /dev/null
buildah rm "$container" > /dev/null
