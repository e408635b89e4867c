#!/usr/bin/env python
"""Run benchmarks/memory.py for each list of arguments, each time in a fork of one process that has imported it.

    python tests/programs/projections.py '[["--atlas", "atlas.h5ad"], ["--atlas", "atlas.h5ad", "--no-mmap"]]'

Thus, no measurement reuses memory that an earlier one freed. The last line of each measurement is its report.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import memory


def main() -> int:
    for arguments in json.loads(sys.argv[1]):
        pid = os.fork()
        if pid == 0:
            try:
                memory.main(arguments)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
