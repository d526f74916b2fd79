# Sets CANN's environment if CANN is installed; existing values stay. environment.sh reads this file. In
# containers of Dockerfile.ascend, each shell that runs a command also reads it (BASH_ENV), because KubeRay
# replaces the entry point.

unset BASH_ENV  # CANN's own scripts may start shells, which would read this file again

# CANN's own scripts use variables that may not be set, and end with commands that may fail. They would use this
# script's arguments as their own, so they are called without arguments.
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
  # CANN 8.5 and newer is in cann/, older CANN in ascend-toolkit/. The newer one is used, as in
  # 'dist-aclgraph doctor'.
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
