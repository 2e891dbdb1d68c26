"""The operator as Pallas kernels for TPUs (v4 and later): one product for the statistics, one more for dh.

| kernel | products | on chip |
|---|---|---|
| statistics (and the exponentials, where saved) | 1 | [tokens, D] and a block of W |
| statistics at K scales (`vocab_curves`) | 1 | the same, and 96 K bytes of sums a token |
| statistics with the expected row of W, Σ p·W | 2 | the same, float32 sums [tokens, D] and the block of W before |
| dh for any cotangents (two weights on the rows) | 2, with saved exponentials 1 | the same |
| dW, db | 2, with saved exponentials 1 | [columns, D] with float32 sums, and a block of tokens |

At a D that is no multiple of 128, as 2,880, XLA stores W with the vocabulary along lanes (`common.Axes`). The kernels
then have Wᵀ and form dWᵀ. XLA copies hidden states and dh, and W once where it gathers the rows of the targets.

Memory beyond inputs and outputs: 32 bytes per token; with `save_logits` also exponentials, 2.1·N·V bytes in bfloat16.
"""
