#!/usr/bin/env bash
# Render a Kubernetes JobSet for GPU or TPU machines and apply it.
set -euo pipefail
# shellcheck source=tpu_scripts/env.sh
. "$(dirname "$0")/env.sh"

usage="usage: jobset.sh --name N --image I --hosts H --gpus G | --tpu-type T --topology X --chips C
                 [--slices 1] [--package WHEEL_URL|git+URL] [--dry-run] -- train RUN.yaml ..."
name='' image='' hosts='' gpus='' type='' topology='' chips='' slices=1 package=''
while [ $# -gt 0 ]; do
  case $1 in
    --help) echo "$usage"; exit 0 ;;
    --name) name=$(value "$@"); shift 2 ;;
    --image) image=$(value "$@"); shift 2 ;;
    --hosts) hosts=$(value "$@"); shift 2 ;;
    --gpus) gpus=$(value "$@"); shift 2 ;;
    --tpu-type) type=$(value "$@"); shift 2 ;;
    --topology) topology=$(value "$@"); shift 2 ;;
    --chips) chips=$(value "$@"); shift 2 ;;
    --slices) slices=$(value "$@"); shift 2 ;;
    --package) package=$(value "$@"); shift 2 ;;
    --dry-run) DRY_RUN=1; shift ;;
    --) shift; break ;;
    *) fail "unknown argument $1" ;;
  esac
done
need --name "$name"; need --image "$image"; number --hosts "$hosts"; number --slices "$slices"
if ! [[ $name =~ ^[a-z][-a-z0-9]{0,30}$ ]]; then fail "--name $name is no DNS label"; fi
if [ $# = 0 ]; then fail "no jaxpp command after --"; fi
if [ -n "$gpus" ]; then
  number --gpus "$gpus"
  if [ "$slices" != 1 ]; then fail "--slices is for TPU"; fi
  extra=gpu resource="nvidia.com/gpu: $gpus" selector='{}'
  environment="[{name: JAXPP_COORDINATOR_ADDRESS, value: $name-workers-0-0.$name:$PORT},
                {name: JAXPP_NUM_PROCESSES, value: \"$hosts\"},
                {name: JAXPP_PROCESS_ID, valueFrom: {fieldRef: {fieldPath:
                  \"metadata.annotations['batch.kubernetes.io/job-completion-index']\"}}}]"
else # GKE tells TPU pods their peers itself
  need --tpu-type "$type"; need --topology "$topology"; number --chips "$chips"
  extra=tpu resource="google.com/tpu: $chips" environment='[]'
  selector="{cloud.google.com/gke-tpu-accelerator: $type, cloud.google.com/gke-tpu-topology: $topology}"
fi
pip="pip install $(quoted "$(requirement "$package" "$extra")")"

manifest="apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name
  annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool}
spec:
  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}  # a headless service
  coordinator: {replicatedJob: workers, jobIndex: 0, podIndex: 0}
  failurePolicy: {maxRestarts: 3}
  replicatedJobs:
  - name: workers
    replicas: $slices
    template:
      spec:
        completionMode: Indexed
        completions: $hosts
        parallelism: $hosts
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120
            nodeSelector: $selector
            containers:
            - name: jaxpp
              image: \"$image\"
              ports: [{containerPort: $PORT}]
              env: $environment
              resources: {limits: {$resource}}
              command: [bash, -c]
              args:
              - |
                $pip && exec env $REMOTE_ENVIRONMENT jaxpp $(quoted "$@")"
if [ "$DRY_RUN" = 1 ]; then
  printf "kubectl apply -f - <<'MANIFEST'\n%s\nMANIFEST\n" "$manifest"
else
  printf '%s\n' "$manifest" | kubectl apply -f -
fi
