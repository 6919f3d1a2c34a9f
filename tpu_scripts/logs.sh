#!/usr/bin/env bash
# Show the log of one machine (process 0 writes the training lines).
set -euo pipefail
# shellcheck source=tpu_scripts/env.sh
. "$(dirname "$0")/env.sh"

usage="usage: logs.sh --name NODE --zone Z [--worker 0|all] [--follow] [--dry-run]"
name='' zone='' worker=0 follow=''
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "$usage"; exit 0 ;;
    --name) name=$(value "$@"); shift 2 ;;
    --zone) zone=$(value "$@"); shift 2 ;;
    --worker) worker=$(value "$@"); shift 2 ;;
    --follow) follow=' -F'; shift ;;
    --dry-run) DRY_RUN=1; shift ;;
    *) fail "unknown argument $1" ;;
  esac
done
need --name "$name"; need --zone "$zone"
run gcloud compute tpus tpu-vm ssh "$name" "--zone=$zone" "--worker=$worker" \
  "--command=tail -n 100$follow $LOG"
