#!/usr/bin/env bash
# Submit one jaxpp command to SLURM; JAX finds the processes from the step that srun makes.
set -euo pipefail
# shellcheck source=tpu_scripts/env.sh
. "$(dirname "$0")/env.sh"

usage="usage: slurm.sh --nodes N --gpus-per-node G [--task-per node|gpu] [--time 24:00:00]
                [--partition P] [--account A] [--container IMAGE] [--dry-run] -- train RUN.yaml ..."
nodes='' gpus='' per=node time=24:00:00 container='' extra=()
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "$usage"; exit 0 ;;
    --nodes) nodes=$(value "$@"); shift 2 ;;
    --gpus-per-node) gpus=$(value "$@"); shift 2 ;;
    --task-per) per=$(value "$@"); shift 2 ;;
    --time) time=$(value "$@"); shift 2 ;;
    --container) container=$(value "$@"); shift 2 ;;
    --partition | --account) extra+=("$1=$(value "$@")"); shift 2 ;;
    --dry-run) DRY_RUN=1; shift ;;
    --) shift; break ;;
    *) fail "unknown argument $1" ;;
  esac
done
need --nodes "$nodes"; need --gpus-per-node "$gpus"
number --nodes "$nodes"; number --gpus-per-node "$gpus"
case $per in node) tasks=1 ;; gpu) tasks=$gpus ;; *) fail "--task-per $per is not node or gpu" ;; esac
if [ $# = 0 ]; then fail "no jaxpp command after --"; fi

step="srun --kill-on-bad-exit=1"
if [ -n "$container" ]; then step+=" $(quoted "--container-image=$container")"; fi
step+=" env $REMOTE_ENVIRONMENT jaxpp $(quoted "$@")"
# SIGTERM two minutes before the end lets the trainer save; requeued, it resumes by itself.
run sbatch --job-name=jaxpp "--nodes=$nodes" "--ntasks-per-node=$tasks" "--gpus-per-node=$gpus" \
  "--time=$time" --signal=TERM@120 --requeue --open-mode=append --output=jaxpp-%j.log \
  ${extra[@]+"${extra[@]}"} "--wrap=$step"
