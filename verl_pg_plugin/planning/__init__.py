"""What a mini-batch costs, and how it is cut, ordered and spread over ranks. No verl, no torch.distributed."""
