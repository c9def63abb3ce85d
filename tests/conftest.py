"""What all tests share.

Makes ``tests/helpers.py`` importable, since with importlib mode pytest puts no folder onto the path. And one
thread for each test process: the tensors are tiny, and threads of several processes would only wait for
each other.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
