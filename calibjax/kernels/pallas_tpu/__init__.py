"""The operator as Pallas kernels for TPUs (v4 and later): one product for the statistics, one more for dh.

| kernel | products | on chip |
|---|---|---|
| statistics (and the float32 logits, where saved) | 1 | [tokens, D] and a block of W |
| statistics with the rows that dh needs | 2 | the same and float32 sums [tokens, D] |
| dh for any cotangents (two weights on the rows) | 2, with saved logits 1 | the same |
| dW, db | 2, with saved logits 1 | [columns, D] with float32 sums, and a block of tokens |

Memory beyond inputs and outputs: 32 bytes a token for the statistics. Where hidden states and unembedding are both
differentiated, dh comes out of the forward pass and dW is a pass of its own: four products in all, and five where
`expected_logit`, or `mean_logit` under a soft-cap, is among the statistics. With `save_logits` (4 N V bytes) it is
three for everything: dh then comes out of the backward pass.

With `filter_threshold` the second product of dh and of dW is taken only for the blocks (`blocks.Blocks`: `tokens` by
`unit` columns for dh, `columns` by `unit` tokens for dW) in which a p reaches it or a one-hot lies; where dh comes out
of the forward pass, that is of dW alone.
"""

from calibjax.kernels.pallas_tpu.implementation import IMPLEMENTATION as IMPLEMENTATION
from calibjax.kernels.pallas_tpu.implementation import make as make
