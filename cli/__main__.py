"""`python -m gapa_onnx.cli`, the same as the command `gapa-onnx`."""

import sys

from gapa_onnx.cli import main

if __name__ == "__main__":
    sys.exit(main())
