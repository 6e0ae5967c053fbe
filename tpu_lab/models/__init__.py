"""Four small classics in plain PyTorch that know no device: minGPT, ResNet, DLRM and UNet, on real data.

Each file has the same five names, so that a test or a notebook can walk over all four:
`Config` (frozen, with `tiny()`, `small()`, `full()`), `Model(config)`, `batch(config, size, seed)` (seeded real data,
on the CPU), `loss(model, *batch)` (a scalar) and `flops(config, size)` (model FLOPs of one training step).

Model FLOPs follow one convention: a multiply-add is 2 FLOPs, backward is twice forward, lookups, norms, activations
and other elementwise work are left out, and causal attention counts half. It is the convention of the MFU in
Chowdhery et al. 2022, "PaLM", appendix B (arXiv 2204.02311), with attention halved as in Dao 2023,
"FlashAttention-2", section 4 (arXiv 2307.08691). What the device really ran is counted op by op, not here.
"""
