# CANN's environment, where CANN is installed; existing values stay. environment.sh reads this file, and in containers
# of Dockerfile.ascend each shell that runs a command does (BASH_ENV), because KubeRay replaces the entry point.

unset BASH_ENV  # CANN's own scripts may start shells, which would read this file again

# CANN's own scripts use variables that may not be set, end with commands that may fail, and would take our arguments
# for theirs: they get none.
read_script() {
  local script=$1 options=$-
  shift
  set +eu
  . "$script" || echo "$script ended with $?: is CANN whole? 'dist-aclgraph doctor' looks at it" >&2
  case $options in *e*) set -e ;; esac
  case $options in *u*) set -u ;; esac
}

read_cann() {
  local installed=${ASCEND_INSTALL_PATH:-/usr/local/Ascend} script
  # From 8.5 on CANN is in cann/, before in ascend-toolkit/. The newer one wins, as in 'dist-aclgraph doctor'.
  for script in "$installed"/{cann,ascend-toolkit}/set_env.sh; do
    if [ -z "${ASCEND_HOME_PATH:-}" ] && [ -f "$script" ]; then
      read_script "$script"
      break
    fi
  done
  script=$installed/nnal/atb/set_env.sh
  if [ -z "${ATB_HOME_PATH:-}" ] && [ -f "$script" ]; then
    read_script "$script"
  fi
}

read_cann
unset -f read_script read_cann
