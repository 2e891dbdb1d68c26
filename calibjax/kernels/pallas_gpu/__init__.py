"""The operator on Hopper GPUs (H100, H200) by Pallas Mosaic-GPU (wgmma, TMA).

| pass | by | products | memory beyond inputs and outputs |
|---|---|---|---|
| statistics | a kernel, `forward` | 1 | 28 bytes a token for each piece of the vocabulary, up to 16 MiB or 9 pieces |
| the same with `save_logits` | the same | 1 | and the float32 logits |
| dh, dW, db in the backward pass | a kernel for dz, `backward`, and XLA's products | 1 more than there are gradients | see there |
| the same of saved logits | XLA | as many as there are gradients | the same |
| the products with `filter_threshold` | a kernel, `products` | those of blocks that matter | a float32 block of dW, and of dh |
| statistics with the rows that dh needs, where W is frozen | `chunked.forward` | 2 | its blocks |

`implementation=None` does not take it: nothing here was timed on a GPU yet (`kernels/RESULTS.md`).
"""

from calibjax.kernels.pallas_gpu.implementation import IMPLEMENTATION as IMPLEMENTATION
from calibjax.kernels.pallas_gpu.implementation import make as make
