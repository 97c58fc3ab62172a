#!/usr/bin/env bash
# Installs what pip cannot bring: a C++20 compiler, GoogleTest, JSON and k-d trees for C++, the Python
# headers and venv, and the MPI launchers that tests start. Prefers what is there, asks apt only for
# what is missing, and says what to install when it may not.
# Usage: install_system_packages.sh PYTHON
set -euo pipefail
python=${1:-python3}
missing=()

has() { command -v "$1" > /dev/null 2>&1; }

has g++ || missing+=(g++)
has make || missing+=(make)
has git || missing+=(git)
if ! has "$python"; then
  missing+=(python3 python3-venv python3-dev)
else
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || { echo "$python is older than 3.10; set PYTHON=python3.x" >&2; exit 1; }
  "$python" -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -f "$headers/Python.h" ] || missing+=(python3-dev)
fi
[ -f /usr/include/nlohmann/json.hpp ] || [ -f /usr/local/include/nlohmann/json.hpp ] \
  || missing+=(nlohmann-json3-dev)
[ -f /usr/include/nanoflann.hpp ] || [ -f /usr/local/include/nanoflann.hpp ] \
  || missing+=(libnanoflann-dev)
# Real launchers for the tests, and MPI for the example that is an MPI program.
has mpirun.openmpi || missing+=(openmpi-bin)
has mpicxx.openmpi || missing+=(libopenmpi-dev)
has mpirun.mpich || missing+=(mpich)
[ -f /usr/include/gtest/gtest.h ] || [ -f /usr/local/include/gtest/gtest.h ] || missing+=(libgtest-dev)

if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
# Nothing needs it, but where packages are installed anyway this small one is: mesh files in HDF5.
[ -d /usr/include/hdf5 ] || missing+=(libhdf5-dev)
echo "Missing: ${missing[*]}"
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  has sudo || { echo "Ask an administrator for: apt-get install ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
has apt-get || { echo "No apt-get here: install ${missing[*]} by hand, then run again" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get update -qq < /dev/null
"${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" < /dev/null > /dev/null
