# shellcheck shell=bash
# Variables and functions of the other scripts, which source this file. Runs on bash 3.2 too.

# What every machine is told. XLA flags come and go between releases, so none is set here:
# put yours in LIBTPU_INIT_ARGS (TPU) or XLA_FLAGS and they are passed on.
REMOTE_ENVIRONMENT="PYTHONUNBUFFERED=1 JAXPP_INIT_TIMEOUT_S=${JAXPP_INIT_TIMEOUT_S:-600}"
for variable in LIBTPU_INIT_ARGS XLA_FLAGS; do
  if [ -n "${!variable:-}" ]; then
    REMOTE_ENVIRONMENT+=" $variable=$(printf '%q' "${!variable}")"
  fi
done
PORT=8482
LOG='jaxpp.log'
DRY_RUN=0
export REMOTE_ENVIRONMENT PORT LOG DRY_RUN

fail() {
  echo "error: $1; see --help" >&2
  exit 2
}

# The value of an option, called as: value "$@" with the option first.
value() {
  if [ $# -lt 2 ] || [ -z "$2" ]; then fail "$1 needs a value"; fi
  printf '%s' "$2"
}

need() { if [ -z "$2" ]; then fail "$1 is missing"; fi; }

number() { case $2 in '' | 0* | *[!0-9]*) fail "$1 $2 is no number above 0" ;; esac; }

# Words, quoted so that they can be pasted into a shell.
quoted() {
  local text
  text=$(printf '%q ' "$@")
  printf '%s' "${text% }"
}

# Run a command, or print it under --dry-run.
run() { if [ "$DRY_RUN" = 1 ]; then printf '%s\n' "$(quoted "$@")"; else "$@"; fi; }

# The nodes of a queued resource: NAME, or NAME-0, NAME-1, ... for several slices.
nodes() {
  local k
  if [ "$2" = 1 ]; then echo "$1"; return; fi
  for ((k = 0; k < $2; k++)); do echo "$1-$k"; done
}

# pip's name for a package: the project by default, else a wheel or a git address.
requirement() {
  case $1 in
    '') echo "jaxpp-toolkit[$2]" ;;
    git+*) echo "jaxpp-toolkit[$2] @ $1" ;;
    *) echo "$1[$2]" ;;
  esac
}
