#!/usr/bin/env bash
# Start one jaxpp command on every machine of every slice; it goes on when you log out.
set -euo pipefail
# shellcheck source=tpu_scripts/env.sh
. "$(dirname "$0")/env.sh"

usage="usage: run.sh --name N --zone Z [--slices 1] [--copy FILE] [--dry-run] -- train RUN.yaml ..."
name='' zone='' slices=1 copy=''
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "$usage"; exit 0 ;;
    --name) name=$(value "$@"); shift 2 ;;
    --zone) zone=$(value "$@"); shift 2 ;;
    --slices) slices=$(value "$@"); shift 2 ;;
    --copy) copy=$(value "$@"); shift 2 ;;
    --dry-run) DRY_RUN=1; shift ;;
    --) shift; break ;;
    *) fail "unknown argument $1" ;;
  esac
done
need --name "$name"; need --zone "$zone"; number --slices "$slices"
if [ $# = 0 ]; then fail "no jaxpp command after --"; fi

# All workers must start: one that is missing leaves the others waiting.
command="nohup env $REMOTE_ENVIRONMENT jaxpp-venv/bin/jaxpp $(quoted "$@") > $LOG 2>&1 < /dev/null &"
for node in $(nodes "$name" "$slices"); do
  if [ -n "$copy" ]; then
    run gcloud compute tpus tpu-vm scp "$copy" "$node:" --worker=all "--zone=$zone"
  fi
  run gcloud compute tpus tpu-vm ssh "$node" "--zone=$zone" --worker=all "--command=$command"
done
