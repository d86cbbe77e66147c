#!/bin/bash
# @PRESET@: one node's part of the server.
# Several nodes: set NODE_RANK (0 to @LAST@) and DIST_INIT_ADDR (HOST:PORT of node 0) on each.
set -euo pipefail

@EXPORTS@
exec "${PYTHON:-python3}" -m sglang.launch_server \
  @ARGUMENTS@ \
  @NODE_ARGUMENTS@--host "${SGLANG_HOST:-127.0.0.1}" --port "${SGLANG_PORT:-30000}"
