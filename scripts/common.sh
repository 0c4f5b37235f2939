# Find a Python, and keep one virtual environment for each purpose in the repository. The scripts in this folder source
# this file.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PIP_DISABLE_PIP_VERSION_CHECK=1
export ORT_DISABLE_TELEMETRY=1
# The environment that lint, test and fuzz share. If they used different extras, each script would reinstall it. CI also
# uses it for docs.
test_extras="[cpu,coco,sign,dev]"
docs_environment=docs docs_extras="[cpu,docs]"
if [[ -n "${EDGEQ_ONE_ENVIRONMENT:-}" ]]; then
  test_extras="[cpu,coco,sign,dev,docs]"
  docs_environment=test docs_extras="$test_extras"
fi

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  exit 1
}

# find_python: print the first interpreter of 3.11 or newer. PYTHON overrides the search.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
    [[ -n "${PYTHON:-}" ]] && fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
  done
  fail "no Python 3.11 or newer found. Install one, or name it: PYTHON=/path/to/python3.11 $0"
}

# fingerprint PATH...: one number that changes when a file under PATH changes.
fingerprint() {
  (
    cd "$root"
    find "$@" -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 cksum | cksum
  )
}

# use_environment NAME REQUIREMENT MODE: make or reuse $root/.venv-NAME with REQUIREMENT (such as "[cpu]" of this
# repository) and set $python. MODE is "editable", or "copy" for what a user gets from `pip install`.
# pip runs only when something that it would install has changed.
use_environment() {
  local name="$1" extras="$2" mode="$3" venv stamp wanted
  venv="$root/.venv-$name"
  stamp="$venv/edgeq-installed"
  python="$venv/bin/python"
  if ! "$python" -c 'import pip' >/dev/null 2>&1; then
    create_environment "$venv"
  fi
  wanted="$root $extras $mode $("$python" --version)"
  if [[ "$mode" == copy ]]; then
    wanted+=" $(fingerprint pyproject.toml README.md edgeq profiles targets)"
  else
    # Even in this mode, files that are included from outside the package are copied.
    wanted+=" $(fingerprint pyproject.toml profiles targets)"
  fi
  if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    return
  fi
  echo "Installing edgeq$extras into ${venv#"$PWD"/} ..." >&2
  rm -f "$stamp"
  if [[ "$mode" == copy ]]; then
    "$python" -m pip install -qq "$root$extras" || fail "pip could not install edgeq$extras; its message is above"
  else
    "$python" -m pip install -qq --editable "$root$extras" ||
      fail "pip could not install edgeq$extras; its message is above"
  fi
  printf '%s\n' "$wanted" >"$stamp"
}

# create_environment DIRECTORY: make a virtual environment. Debian's python3 has no ensurepip; there the outer pip installs
# pip into the environment.
create_environment() {
  local venv="$1" outer
  outer="$(find_python)"
  if "$outer" -m venv --clear "$venv" >/dev/null 2>&1; then
    return
  fi
  "$outer" -m venv --clear --without-pip "$venv" >/dev/null 2>&1 ||
    fail "$outer cannot make a virtual environment in $venv. Install its venv module (Debian: apt install python3-venv)"
  "$outer" -m pip --python "$venv/bin/python" install -qq pip ||
    fail "$outer has neither ensurepip nor a pip of 22.3 or newer. Install one (Debian: apt install python3-venv)"
}

# add_engines EXTRA...: install these plug-in engines (docs/engines.md) into $python's environment if they are available.
add_engines() {
  local extra
  for extra in "$@"; do
    "$python" -m pip install -qq "edgeq[$extra]" || echo "could not install edgeq[$extra]; what needs it is left out" >&2
  done
}
