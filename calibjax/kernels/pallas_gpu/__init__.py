"""The operator on Hopper GPUs (H100, H200) by Pallas Mosaic-GPU: the statistics in one kernel (wgmma, TMA).

| pass | by | products | memory beyond inputs and outputs |
|---|---|---|---|
| statistics | the kernel | 1 | 28 bytes a token for each piece of the vocabulary, up to 16 MiB or 9 pieces |
| statistics with the rows that dh needs | `chunked.forward` | 2 | its blocks |
| dh, dW, db in the backward pass | `chunked.backward` | 1 more than there are gradients | its blocks |

`implementation=None` does not take it: nothing here was timed on a GPU yet (`kernels/RESULTS.md`).
"""

from calibjax.kernels.pallas_gpu.implementation import IMPLEMENTATION as IMPLEMENTATION
from calibjax.kernels.pallas_gpu.implementation import make as make
