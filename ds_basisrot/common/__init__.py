"""What both adapters, for DeepSpeed and for Megatron, need besides the method: the JSON blocks, agreement of all ranks, the log."""
