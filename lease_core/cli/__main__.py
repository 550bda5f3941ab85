"""``python -m lease_core.cli``, the same as ``omnirelay``."""

import sys

from lease_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
