"""Which sequences are computed together: on which rank, in which mini-batch and micro-batch, in which order.

Knows numpy and the layout of prefixes, and neither torch.distributed nor verl.
"""
