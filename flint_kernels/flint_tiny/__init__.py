"""flint-tiny: a real 5.1M-parameter checkpoint of Flint's architecture, and how it was made.

Three commands make it, in this order. `numpy`, `safetensors`, `tokenizers` and `torch` are needed
by all, `gguf` only by the last:

    python3.13 -m flint_kernels.flint_tiny.corpus --output build/flint_tiny
    python -m flint_kernels.flint_tiny.train --data build/flint_tiny --output build/flint_tiny_run
    python -m flint_kernels.flint_tiny.export --data build/flint_tiny --run build/flint_tiny_run

`corpus` reads the text of the standard library of one CPython (name it with `--stdlib` when it is
not the running one), trains the tokenizer on it and packs token files. `train` trains in BF16,
then quantisation-aware with the BF16 model as teacher; it is made for one H200 and keeps within
7.6 minutes, whatever the speed. `export` writes `checkpoint/bf16` and `checkpoint/nvfp4` and reads
both back.
"""
