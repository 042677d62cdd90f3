"""Raw text to packed rows: our loader with a tokenizer in it, against `encode_batch` alone and PyTorch's DataLoader.

See benchmarks/README.md.

    python benchmarks/tokenize.py             the full run, some minutes
    python benchmarks/tokenize.py --quick     under a minute, to see that it works
    python benchmarks/tokenize.py --json      the last line is one JSON object
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))

if __name__ == "__main__":
    # Behind the standard library, which has a module of this file's name.
    sys.path[:] = [*(entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE), _HERE]
    from tokenize_throughput import main

    sys.exit(main(__doc__))
else:
    # Imported by a script of this folder: what is meant is the standard library's module.
    import importlib.util

    _spec = importlib.util.spec_from_file_location(__name__, os.path.join(os.path.dirname(os.__file__), "tokenize.py"))
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[__name__] = _module
    _spec.loader.exec_module(_module)
