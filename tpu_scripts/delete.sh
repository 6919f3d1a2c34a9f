#!/usr/bin/env bash
# Delete a queued resource with all its slices; gcloud asks first unless --yes.
set -euo pipefail
# shellcheck source=tpu_scripts/env.sh
. "$(dirname "$0")/env.sh"

usage="usage: delete.sh --name N --zone Z [--yes] [--dry-run]"
name='' zone='' yes=0
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "$usage"; exit 0 ;;
    --name) name=$(value "$@"); shift 2 ;;
    --zone) zone=$(value "$@"); shift 2 ;;
    --yes) yes=1; shift ;;
    --dry-run) DRY_RUN=1; shift ;;
    *) fail "unknown argument $1" ;;
  esac
done
need --name "$name"; need --zone "$zone"
command=(gcloud compute tpus queued-resources delete "$name" "--zone=$zone" --force)
if [ "$yes" = 1 ]; then command+=(--quiet); fi
run "${command[@]}"
