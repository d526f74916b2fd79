# Sets CANN's environment if CANN is installed; existing values stay. environment.sh reads this
# file. In containers of Dockerfile.ascend, each shell that runs a command also reads it (BASH_ENV),
# because KubeRay replaces the entry point.

unset BASH_ENV  # CANN's own scripts may start shells, which would read this file again

# CANN's own scripts use variables that may not be set, and end with commands that may fail. They
# would use this script's arguments as their own, so they are called without arguments.
read_script() {
  local script=$1 options=$-
  shift
  set +eu
  . "$script" || echo "$script ended with $?: is CANN whole? 'dist-aclgraph doctor' looks at it" >&2
  case $options in *e*) set -e ;; esac
  case $options in *u*) set -u ;; esac
}

# Reads the first script that exists, unless a script has set the variable $1.
read_first() {
  local script variable=$1
  shift
  for script; do
    if [ -z "${!variable:-}" ] && [ -f "$script" ]; then
      read_script "$script"
      break
    fi
  done
}

read_cann() {
  local root roots=(/usr/local/Ascend "${HOME:-}/Ascend")
  if [ -n "${ASCEND_INSTALL_PATH:-}" ]; then
    roots=("$ASCEND_INSTALL_PATH")
  fi
  # Users other than root install CANN in their home folders. CANN 8.5 and newer is in cann/, older
  # CANN in ascend-toolkit/. The order is that of 'dist-aclgraph doctor'.
  for root in "${roots[@]}"; do
    read_first ASCEND_HOME_PATH "$root"/{cann,ascend-toolkit}/set_env.sh
    read_first ATB_HOME_PATH "$root/nnal/atb/set_env.sh"
  done
}

read_cann
unset -f read_script read_first read_cann
