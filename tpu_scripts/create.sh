#!/usr/bin/env bash
# Create TPU slices as a queued resource and install jaxpp on every machine.
set -euo pipefail
# shellcheck source=tpu_scripts/env.sh
. "$(dirname "$0")/env.sh"

usage="usage: create.sh --name N --zone Z --type T --runtime R [--slices 1] [--spot]
                 [--package WHEEL|git+URL] [--no-install] [--dry-run]"
name='' zone='' type='' runtime='' slices=1 spot=0 package='' install=1
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "$usage"; exit 0 ;;
    --name) name=$(value "$@"); shift 2 ;;
    --zone) zone=$(value "$@"); shift 2 ;;
    --type) type=$(value "$@"); shift 2 ;;
    --runtime) runtime=$(value "$@"); shift 2 ;;
    --slices) slices=$(value "$@"); shift 2 ;;
    --package) package=$(value "$@"); shift 2 ;;
    --spot) spot=1; shift ;;
    --no-install) install=0; shift ;;
    --dry-run) DRY_RUN=1; shift ;;
    *) fail "unknown argument $1" ;;
  esac
done
need --name "$name"; need --zone "$zone"; need --type "$type"; need --runtime "$runtime"
number --slices "$slices"

request=(gcloud compute tpus queued-resources create "$name" "--zone=$zone"
  "--accelerator-type=$type" "--runtime-version=$runtime")
if [ "$slices" = 1 ]; then request+=("--node-id=$name"); else
  request+=("--node-count=$slices" "--node-prefix=$name")
fi
if [ "$spot" = 1 ]; then request+=(--spot); fi
run "${request[@]}"
if [ "$install" = 0 ]; then exit 0; fi

describe=(gcloud compute tpus queued-resources describe "$name" "--zone=$zone"
  "--format=value(state.state)")
if [ "$DRY_RUN" = 1 ]; then
  echo "until [ \"\$($(quoted "${describe[@]}"))\" = ACTIVE ]; do sleep 30; done"
else
  until state=$("${describe[@]}") && [ "$state" = ACTIVE ]; do
    case $state in FAILED | SUSPENDED) echo "error: $name is $state" >&2; exit 1 ;; esac
    sleep 30
  done
fi
# The machines' own Python is 3.10, one too old.
python='{ command -v python3.11 || { sudo apt-get update && sudo apt-get install -y python3.11-venv; }; }'
for node in $(nodes "$name" "$slices"); do
  source=$package
  case $package in
    *.whl)
      run gcloud compute tpus tpu-vm scp "$package" "$node:" --worker=all "--zone=$zone"
      source=./${package##*/} ;;
  esac
  pip="jaxpp-venv/bin/pip install $(quoted "$(requirement "$source" tpu)")"
  run gcloud compute tpus tpu-vm ssh "$node" "--zone=$zone" --worker=all \
    "--command=$python && python3.11 -m venv jaxpp-venv && $pip"
done
