#!/usr/bin/env bash
# Healthy: the package can be imported and, where this container is a host, its
# sshd lets the cluster's key in.

set -euo pipefail
python -c 'import horovod_gradcomp'
for process in /proc/[0-9]*/comm; do
    if [[ $(cat "$process" 2>/dev/null) == sshd ]]; then
        exec ssh localhost true
    fi
done
