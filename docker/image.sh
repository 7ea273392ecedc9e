#!/bin/bash
# Build the image of docker/Dockerfile and test it: `make image`.
#
#   BUILDER=podman           docker, podman or buildah; by default the first one that works
#   BASE=docker.io/library/python:3.12-slim    image to build on: Python with venv and headers, Debian's apt-get
#   IMAGE=lightning-mhla     name of the result
set -euo pipefail
cd "$(dirname "$0")/.."
image=${IMAGE:-lightning-mhla}

missing=
for builder in ${BUILDER:-docker podman buildah} ''; do
  if [ -z "$builder" ]; then
    echo "error: no program builds images here ($missing): install docker, podman or buildah" >&2
    exit 2
  elif ! command -v "$builder" >/dev/null; then
    missing+="${missing:+; }$builder is not installed"
  elif ! problem=$("$builder" info 2>&1 >/dev/null); then # the docker daemon may not run
    missing+="${missing:+; }$builder does not work: $(tail -n 1 <<<"$problem")"
  else
    break
  fi
done

echo "building $image with $builder"
"$builder" build ${BASE:+--build-arg "BASE=$BASE"} --file docker/Dockerfile --tag "$image" .

if [ "$builder" = buildah ]; then # buildah runs containers, not images
  container=$(buildah from "$image")
  trap 'buildah rm "$container" >/dev/null' EXIT
fi
try() { # try USER COMMAND...
  echo "as user $1: ${*:2}"
  if [ "$builder" = buildah ]; then
    buildah run --user "$1" "$container" -- "${@:2}"
  else
    "$builder" run --rm --user "$1" "$image" "${@:2}"
  fi
}
fit=(lightning fit --config configs/classification/digits.yaml --trainer.accelerator=cpu --trainer.max_steps=10)
try mhla sh -c '[ "$(id -u)" -ne 0 ]'
try mhla lightning doctor
try mhla "${fit[@]}" --run_dir runs/own-user
try 4321:4321 "${fit[@]}" --run_dir runs/unknown-user # as with --user "$(id -u)"
echo "$image works: $("$builder" images --format '{{.Size}}' "$image"), built with $("$builder" --version)"
