#!/bin/sh
# Prints a Python 3.12 that can make virtual environments: $PYTHON if it is set, else the first in the usual places.
# Each is run before it is taken: a shim of pyenv may be there and have no such version behind it.

is_one() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

if [ -n "$PYTHON" ]; then
    is_one "$PYTHON" && { echo "$PYTHON"; exit; }
    echo "PYTHON=$PYTHON is no Python 3.12 with the modules venv and ensurepip." >&2
else
    for python in python3.12 python3 python /usr/bin/python3.12 /usr/local/bin/python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.12*/bin/python3.12 \
        "${CONDA_PREFIX:-/opt/conda}"/bin/python3.12 /opt/python/3.12*/bin/python3.12; do
        is_one "$python" && { echo "$python"; exit; }
    done
    echo "slimrl runs on Python 3.12, and none was found." >&2
fi
cat >&2 <<'END'
Install one and say its path if it is not found by itself (`make setup PYTHON=/path/to/python3.12`):
  Debian, Ubuntu   apt install python3.12 python3.12-venv     (where the release has it)
  pyenv            pyenv install 3.12
  uv               uv python install 3.12
  conda            conda create --name slimrl python=3.12
END
exit 1
