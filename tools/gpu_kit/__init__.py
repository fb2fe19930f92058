"""The GPU kit: what proves and measures overlap on a bare machine with one GPU, in the minutes that there is one.

Such a machine has Python 3.12, torch for CUDA and transformers, but neither vLLM nor a network, and takes 64 MiB.
`build` makes the kit on a machine with a package index (`make gpu-kit`), of the packages in `pins.txt`: `wheels` gets
them, `slim` cuts vLLM's libraries to the code of one GPU, and `archive` packs them; `machine.txt` says what is there.
On that machine `run.sh` lets `unpack` unpack it, and `runner` run the `parts`. `page` writes docs/hardware.md from what
they show.
"""
