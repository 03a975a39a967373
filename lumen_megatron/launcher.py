"""`lumen-megatron pretrain_gpt.py <its flags>`: a Megatron script, unchanged, that knows `--transformer-impl lumen`.

Under a launcher of ranks: `torchrun --nproc-per-node 8 -m lumen_megatron.launcher pretrain_gpt.py <its flags>`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_USAGE = "usage: lumen-megatron SCRIPT [flags of the script]\n\n"


def main() -> None:
    """Run the script that the command line names."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(_USAGE + __doc__.strip() + "\n")
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"lumen-megatron: {script}: no such file")
    # As `python SCRIPT` does: the script's folder is where it finds its neighbours, and Megatron itself.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = sys.argv[1:]

    import lumen_megatron.auto  # noqa: F401 - acts by being imported, once the script's folder is on the path

    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
