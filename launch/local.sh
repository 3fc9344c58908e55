#!/usr/bin/env bash
# launch/local.sh N command...: runs `jaxmoe command...` on N devices of this machine.
# PYTHON names the interpreter (default: python).
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 N command... (N devices, at least 1)" >&2
    exit 2
fi
devices=$1
shift
exec "${PYTHON:-python}" -m jaxmoe "$@" --devices "$devices"
