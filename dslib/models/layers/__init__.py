"""The modules that put an attention into a model, a file each: dense, sparse (window, MoBA, NSA), DSA, RWKV-7."""
