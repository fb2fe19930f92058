"""Readers of traces and of torch profiles, with summaries and drawings of steps.

Why a reader of our own: Holistic Trace Analysis sums idle and overlapped time by rank, from kernels. It knows no step,
micro-batch or wait. Perfetto's trace processor answers SQL, with a binary that it downloads at first use. Here the
question is which op of which micro-batch a lane waited for.
"""
