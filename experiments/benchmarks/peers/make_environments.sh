#!/usr/bin/env bash
# One virtual environment for each simulator that experiments/speed.py measures beside this one.
#
#     experiments/benchmarks/peers/make_environments.sh [FOLDER] [PEER...]
#
# FOLDER: default .peers. PEER: torch, fedjax, pfl, flower; default: all of them. PYTHON names the
# interpreter (default python3), so that a peer can have one of its own:
#
#     PYTHON=python3.12 experiments/benchmarks/peers/make_environments.sh .peers fedjax
#
# torch is installed first, in the version that TORCH names, so that a peer that depends on it does
# not choose another build: on a machine without a GPU set PIP_EXTRA_INDEX_URL to PyTorch's CPU
# index (https://download.pytorch.org/whl/cpu), or pip takes gigabytes of CUDA libraries.
set -euo pipefail

folder=${1:-.peers}
shift || true
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(torch fedjax pfl flower)
torch=${TORCH:-torch==2.13.0}

for peer in "${peers[@]}"; do
  case $peer in
    torch) packages=("$torch" numpy) ;;
    fedjax) packages=(fedjax==0.0.17 dm-haiku jax numpy) ;;
    pfl) packages=("$torch" "pfl[pytorch]==0.6.0" numpy) ;;
    flower) packages=("$torch" "flwr[simulation]==1.41.0" numpy) ;;
    *) echo "peer = $peer: expected torch, fedjax, pfl or flower" >&2; exit 2 ;;
  esac
  "${PYTHON:-python3}" -m venv "$folder/$peer"
  python=$folder/$peer/bin/python
  if [[ ${packages[0]} == torch* ]]; then "$python" -m pip install --quiet "${packages[0]}"; fi
  "$python" -m pip install --quiet "${packages[@]}"
  echo "$peer: $("$python" -m pip freeze | grep -i -E '^(torch|fedjax|jax|dm-haiku|pfl|flwr|ray)=' | tr '\n' ' ')"
done
