"""The operator on Hopper GPUs (H100, H200) by Pallas Mosaic-GPU (wgmma, TMA).

| pass | by | products | memory beyond inputs and outputs |
|---|---|---|---|
| statistics | a kernel, `forward` | 1 | 28 bytes per token for each piece of the vocabulary, up to 16 MiB or 9 pieces |
| with `save_logits` | the same | 1 | the same and the exponentials in 16 bits, 2.06 bytes a logit |
| gradients, backward | a kernel for dz, and XLA: `backward` | one per gradient + 1 | chunks of dz, W and dW; dh |
| the same from saved exponentials | XLA | one per gradient | the same |
| from exponentials relative to the targets' logits | XLA | one per gradient | dh |

A chunk is 8,192 columns, or fewer, so that the dz of all tokens takes at most 512 MiB; from saved exponentials as many
as take 1 GiB. The last row needs no dz: bfloat16, no soft-cap, no gradient in scale or bias. dh is summed in float32.
Times on an H200: `kernels/HOPPER.md`.
"""
