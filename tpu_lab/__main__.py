"""`python -m tpu_lab` is the command `tpu-lab`."""

import sys

from tpu_lab.cli import main

sys.exit(main(sys.argv[1:]))
