"""The GPU kit: what a bare machine with one GPU and no network needs, besides the checkout, to run vLLM with overlap.

Such a machine has Python 3.12, torch for CUDA and transformers, and takes 64 MiB. `build` makes the kit on a machine
with a package index (`make gpu-kit`), of the packages in `pins.txt`: `wheels` gets them, `slim` cuts vLLM's libraries
to the code of one GPU, and `archive` packs them. `unpack` unpacks it where it is to be used; `machine.txt` says what is
there already.
"""
